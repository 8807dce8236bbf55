"""Checkpoints: a tree in one file that is whole or absent, or from many ranks in a folder, to load under any plan."""

from funcrec.checkpoint._asynchronous import Saving as Saving
from funcrec.checkpoint._asynchronous import finish as finish
from funcrec.checkpoint._asynchronous import settle as settle
from funcrec.checkpoint._checkpoint import load as load
from funcrec.checkpoint._checkpoint import load_as as load_as
from funcrec.checkpoint._checkpoint import save as save
from funcrec.checkpoint._checkpoint import save_owned as save_owned
from funcrec.checkpoint._like import difference_problems as difference_problems
from funcrec.checkpoint._safetensors import load_safetensors as load_safetensors
from funcrec.checkpoint._safetensors import save_safetensors as save_safetensors
from funcrec.checkpoint._steps import latest as latest
from funcrec.checkpoint._steps import remove_all as remove_all
