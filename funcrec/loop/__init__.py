"""Training loops: `fit` and `evaluate`, and the parts of both for a loop of your own."""

import funcrec.core as _core
from funcrec.loop._callbacks import Record as Record
from funcrec.loop._callbacks import csv_lines as csv_lines
from funcrec.loop._callbacks import json_lines as json_lines
from funcrec.loop._callbacks import print_epoch as print_epoch
from funcrec.loop._callbacks import tensorboard as tensorboard
from funcrec.loop._diverged import DivergedError as DivergedError
from funcrec.loop._epochs import best_epoch as best_epoch
from funcrec.loop._evaluate import evaluate as evaluate
from funcrec.loop._evaluate_retrieval import evaluate_retrieval as evaluate_retrieval
from funcrec.loop._fit import fit as fit
from funcrec.loop._fitted import Fitted as Fitted
from funcrec.loop._predict import predict as predict
from funcrec.loop._ranks import agreed as agreed
from funcrec.loop._ranks import all_parts as all_parts
from funcrec.loop._ranks import is_chief as is_chief
from funcrec.loop._ranks import num_processes as num_processes
from funcrec.loop._ranks import own_part as own_part
from funcrec.loop._signals import listen as listen
from funcrec.loop._stale import stale_pipeline as stale_pipeline
from funcrec.loop._watch import RankLost as RankLost
from funcrec.loop._watch import watch as watch
from funcrec.loop.pipelines._pipeline import pipeline as pipeline

_core.publish(globals())
