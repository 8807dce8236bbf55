"""Packages: trained models, each in a folder that a server runs."""

import funcrec.core as _core
from funcrec.serve._command import main as main
from funcrec.serve._export import export as export
from funcrec.serve._export import save_weights as save_weights
from funcrec.serve._package import Package as Package
from funcrec.serve._package import load_package as load_package
from funcrec.serve.freshness._delta import write_delta as write_delta
from funcrec.serve.freshness._publish import publish as publish
from funcrec.serve.freshness._push import update_server as update_server

_core.publish(globals())
