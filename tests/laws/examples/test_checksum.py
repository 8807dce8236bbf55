"""The checksum of a training: one recorded number, also on ranks, and wrong options end the program."""

import pytest

from funcrec.examples import checksum

RECORDED = "b825f43bf3c1eec1"  # of 20 steps on drawn rows, on any processor


@pytest.mark.parametrize("options", ["", "--ranks 2 --micro-batches 2"])
def test_the_checksum_is_the_recorded_one(options, capsys):
    """Twenty steps on drawn rows have the recorded checksum, in one process and in micro-batches of two ranks."""
    assert checksum.main(["--steps", "20", "--generated", *options.split()]) == 0
    assert capsys.readouterr().out.strip().endswith(RECORDED)


@pytest.mark.parametrize("options", ["--ranks 3", "--steps 0", "--ranks 4 --micro-batches 2"])
def test_parts_that_are_no_whole_blocks_are_refused(options):
    """Numbers of ranks and micro-batches whose parts are not blocks of 256 examples end the program with code 2."""
    with pytest.raises(SystemExit) as ended:
        checksum.main(options.split())
    assert ended.value.code == 2
