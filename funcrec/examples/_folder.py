"""The folder of a run of the main job: checkpoint.pt, result.json, curve.png.

A run is overwritten or continued only if an option asks for it. If a file cannot be written, the program ends before
any training.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from funcrec.files import write_whole


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="a folder for the results (default runs/MODEL)")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--resume", nargs="?", const="always", choices=("always", "auto"),
        help="go on from the checkpoint in --out; with auto begin where there is none (for torchrun --max-restarts)",
    )  # fmt: skip
    begin.add_argument("--overwrite", action="store_true", help="begin again in a folder that holds a run")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set options.out. End the program if a run would be lost, or if its files could not be written."""
    options.out = options.out or Path("runs") / options.model
    found = [path.name for path in (checkpoint_path(options), *results(options)) if os.path.lexists(path)]
    has_checkpoint = checkpoint_path(options).name in found
    if options.resume == "always" and not has_checkpoint:
        parser.error(f"--resume: there is no {checkpoint_path(options)}; --resume=auto begins where there is none")
    if found and not (options.overwrite or (options.resume and has_checkpoint)):
        parser.error(
            f"{options.out} holds a run ({', '.join(found)}): --resume goes on with it, --overwrite begins again,"
            " --out names another folder"
        )
    if options.overwrite and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        parser.error("--overwrite with --max-restarts would begin again at every restart: --resume=auto")
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out) as file:
                file.write(b"room")
        except OSError as error:
            parser.error(f"--out {options.out} cannot be written: {error.strerror}")


def checkpoint_path(options: argparse.Namespace) -> Path:
    return options.out / "checkpoint.pt"


def results(options: argparse.Namespace) -> tuple[Path, Path]:
    return options.out / "result.json", options.out / "curve.png"


def fixed_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that must not change between a run and its continuation."""
    return {name: getattr(options, name) for name in ("model", "optimizer", "lr", "batch_size", "seed")}


def write_results(options: argparse.Namespace, result: dict[str, Any], figure: Any) -> None:
    """Write result.json and curve.png. Each file is complete, or is not written."""
    text = (json.dumps(result, indent=2) + "\n").encode()
    table, curve = results(options)
    try:
        write_whole("result.json", table, lambda file: file.write(text))
        write_whole("curve.png", curve, lambda file: figure.savefig(file, dpi=120, format="png"))
    except OSError as error:
        raise SystemExit(f"{error}\nThe training is done and its checkpoint whole: --resume reports it.") from error


def remove_results(options: argparse.Namespace) -> None:
    """Remove the results of the earlier run."""
    for path in results(options):
        path.unlink(missing_ok=True)
