"""Interrupt a first fr.jit or fr.export by a signal when torch begins to import a module, then call again.

    PYTHONPATH=tests python -m programs.first_calls jit|export NUMBER

NUMBER: which import gets the signal, counted from the call on. The program prints JSON: whether a signal came, what the
first call raised, the result of the first call, or else of the second, and what the main thread imported in both.
"""

import json
import os
import signal
import sys
import tempfile
import threading

import torch

import funcrec as fr

CLICKED = fr.FeatureConfig("clicked", table="item")
PARAMS = fr.Params({"item": torch.arange(6.0).reshape(3, 2)}, {"w": torch.ones(2)})
BATCH = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [], [0]]}))
OURS = ("funcrec", "__mp_main__", "programs")


class TooLateError(ValueError):
    """The error that the handler raises. Functions may also raise errors of its class themselves."""


def predict(params, batch):
    return fr.lookup(params.tables, batch.ids, [CLICKED]).values @ params.dense["w"]


def loss(params, batch):
    return predict(params, batch).square().sum()


def jit() -> list[float]:
    step = fr.jit(fr.value_and_grad(loss))
    value, grads = step(PARAMS, BATCH)
    return [float(value), *grads.dense["w"].tolist()]


def export() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return fr.load_package(fr.export(predict, PARAMS, BATCH, folder + "/model"))(BATCH).tolist()


class Interrupter:
    """An import finder that finds no module, sends a signal at the chosen import, and notes what the main thread
    imports."""

    def __init__(self, number: int):
        self.left, self.sent, self.by_main = number, "", []
        self.handled = threading.Event()

    def find_spec(self, name, path=None, target=None):
        on_main = threading.current_thread() is threading.main_thread()
        if name.startswith(OURS):
            return
        if on_main:
            self.by_main.append(name)
        if self.sent:
            return
        self.left -= 1
        if self.left == 0:
            self.sent = name
            os.kill(os.getpid(), signal.SIGALRM)
            if not on_main:
                self.handled.wait()

    def handle(self, number, frame):
        self.handled.set()
        raise TooLateError("a handler's own words")


def main() -> None:
    call, interrupter = {"jit": jit, "export": export}[sys.argv[1]], Interrupter(int(sys.argv[2]))
    signal.signal(signal.SIGALRM, interrupter.handle)
    sys.meta_path.insert(0, interrupter)
    said, given = "", None
    try:
        given = call()
    except BaseException as error:
        said = "".join([repr(error), *getattr(error, "__notes__", ())])
    then = call() if said else given
    sys.meta_path.remove(interrupter)
    print(json.dumps({"sent": interrupter.sent, "said": said, "then": then, "by_main": interrupter.by_main}))


if __name__ == "__main__":
    main()
