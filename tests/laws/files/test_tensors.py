"""Files of named tensors. A written file reads back, even by the library of safetensors. A changed file raises."""

import io
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import tensor_files
from safetensors.torch import load as official

from funcrec.files import _tensors as files

KIND, OFFICIAL = "funcrec test 1", [n for n in files.DTYPES if n not in ("C128", "C32", "F8_E8M0")]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda n: not n.startswith("__")
)  # the names have no half of a character, which no other reader takes
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def reader(data):
    return lambda at, n: data[at : at + n]


def written(tensors, texts=(), align=64):
    file, specs = io.BytesIO(), [(n, x.dtype, x.shape) for n, x in tensors.items()]
    files.write_tensors(file, KIND, specs, tensors.values(), dict(texts), align)
    return file.getvalue()


def read(data):
    """Return ({name: tensor}, texts) after a check of every tensor's CRC."""
    places, texts = files.read_header(KIND, len(data), reader(data), 8)
    found = {n: files.tensor_at(bytearray(data), p) for n, p in places.items()}
    for n, p in places.items():
        files.check_crc(p, found[n])
    return found, texts


def bits(tensors):
    return {n: (x.dtype, tuple(x.shape), x.reshape(-1).view(torch.uint8).tolist()) for n, x in tensors.items()}


def made(name, shape, seed):
    """Return a tensor of a dtype with random bits. A tensor of bools has only ones."""
    dtype, count = files.DTYPES[name], torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def contents(draw, dtypes=tuple(files.DTYPES)):
    """Return random {name: tensor}. Shrinks to few small tensors of the first dtypes."""
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    return {n: made(draw(st.sampled_from(dtypes)), draw(SHAPES), i) for i, n in enumerate(names)}


def refused(data):
    try:
        read(data)
    except files.FileError as error:
        what, got, need = error.args
        return bool(what and got and need)
    return False


# -- written and read --------------------------------------------------------------------------------------------


@given(contents(), st.dictionaries(NAMES, NAMES, max_size=2), st.sampled_from([8, 64, 4096]))
def test_what_is_written_is_read(tensors, texts, align):
    """Tensors of every dtype and shape come back bit for bit and in their order, with the texts. The law includes
    tensors that are empty or have no dimension. Each tensor that has bytes begins at a multiple of the alignment."""
    texts = {n: x for n, x in texts.items() if n not in ("format", "crc32", "crc32s")}
    data = written(tensors, texts, align)
    found, told = read(data)
    assert bits(found) == bits(tensors) and list(found) == list(tensors)
    assert {n: told[n] for n in texts} == texts and len(told) == len(texts) + 3
    for p in files.read_header(KIND, len(data), reader(data), align)[0].values():
        if p.nbytes and p.offset % (2 * align):
            with pytest.raises(files.FileError, match="a multiple of"):
                files.read_header(KIND, len(data), reader(data), 2 * align)


@given(contents(OFFICIAL), st.sampled_from([8, 64, 4096]))
def test_the_library_of_safetensors_reads_it(tensors, align):
    """The library of safetensors reads the same bits by the same names. Its only other tensors are padding, of
    zeros."""
    found = official(written(tensors, align=align))
    padding = {n: found.pop(n) for n in list(found) if n.startswith(files.PADDING)}
    assert bits(found) == bits(tensors)
    assert all(x.dtype == torch.uint8 and not x.any() for x in padding.values())


def test_texts_may_come_at_the_end():
    """A text that follows from the tensors takes the place of a text of the same length. A longer text raises."""
    tensors = {"a": torch.arange(5.0), "b": torch.ones(3, dtype=torch.int8)}
    specs = [(n, x.dtype, x.shape) for n, x in tensors.items()]
    write = lambda file, own: files.write_tensors(
        file, KIND, specs, tensors.values(), {"version": "????"}, 64, lambda places: {"version": own}
    )
    file = io.BytesIO()
    places = write(file, "0123")
    found, texts = read(file.getvalue())
    assert texts["version"] == "0123" and bits(found) == bits(tensors)
    assert places == list(files.read_header(KIND, len(file.getvalue()), reader(file.getvalue()), 8)[0].values())
    with pytest.raises(ValueError, match="another length"):
        write(io.BytesIO(), "01234" + "5" * 64)


# -- refused -----------------------------------------------------------------------------------------------------


SMALL = {"a": torch.arange(3, dtype=torch.int16), "é": torch.tensor(True), "none": torch.ones(0, 2), "b": torch.ones(2)}


def test_each_bit_and_each_cut_is_refused():
    """A file with any flipped bit, or one that is cut off anywhere or is longer, raises an error in three parts."""
    data = written(SMALL, {"version": "1"})
    assert not refused(data)
    for at in range(len(data)):
        assert refused(data[:at])
        for bit in range(8):
            assert refused(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]), (at, bit)
    assert refused(data + b"\0") and refused(data + data)


@given(contents(), st.randoms(use_true_random=False))
def test_edits_are_refused(tensors, rng):
    """Inserted, removed and overwritten bytes each raise."""
    data = bytearray(written(tensors))
    before = bytes(data)
    at, size = rng.randrange(len(data)), rng.randrange(1, 9)
    end = at + size if rng.random() < 0.5 else at
    data[at:end] = rng.randbytes(rng.choice([0, size]))
    assert bytes(data) == before or refused(bytes(data))


def test_another_format_is_told():
    """A file of another format, or of another program, raises with the format that is needed."""
    plain = files.header_of([], {}, 8)
    for data in (written(SMALL).replace(b"funcrec test 1", b"funcrec test 2"), plain, b"{" * 100 + bytes(200)):
        if data[:1] == b"{":
            data = (100).to_bytes(8, "little") + data
        with pytest.raises(files.FileError) as error:
            files.read_header(KIND, len(data), reader(data), 8)
        assert error.value.args == ("is of another format", "another beginning", KIND)


def test_lengths_are_held_to_the_file():
    """A read requests no more bytes than a file has, whatever the header of the file says."""
    for length in (1, 64, 2**32, 2**63, 2**64 - 1):
        data = length.to_bytes(8, "little")

        def read_at(at, n, data=data):
            assert at + n <= len(data)
            return data[at : at + n]

        with pytest.raises(files.FileError, match="is cut off"):
            files.read_header(KIND, len(data), read_at, 8)


OTHER = [None, True, -1, 0, 1, 3, 1.5, 1 << 40, 1 << 48, (1 << 48) + 1, 1 << 63, 10**30, "", "F32", "Q4", "U8", [],
    [0], [0, 8], [8, 0], [1, 9], [-8, 0], [[]], [1 << 40, 1 << 40], [0, 1 << 62], {}, {"a": "b"}, "0" * 8,
    "g" * 32]  # fmt: skip


def replaced(rng, node, value):
    """Return the node with one part, at any depth, replaced, added or removed."""
    if not isinstance(node, dict | list) or not node or rng.random() < 0.1:
        return value
    keys = list(node) if isinstance(node, dict) else range(len(node))
    key = rng.choice(keys)
    out = node.copy()
    match rng.randrange(8):
        case 0:
            del out[key]
        case 1 if isinstance(node, dict):
            out["more"] = value
        case 1:
            out.append(value)
        case _:
            out[key] = replaced(rng, node[key], value)
    return out


def test_hostile_headers_are_refused():
    """A header with one changed part, under a right CRC, raises, or the file has its original tensors by other names or
    shapes. Nothing outside the file is read."""
    data, rng, outcomes = written(SMALL), random.Random(0), {True: 0, False: 0}
    content, body = tensor_files.parts(data)
    sizes = sorted(x.nbytes for x in SMALL.values())
    for _ in range(3000):
        changed = replaced(rng, content, rng.choice(OTHER))
        made = tensor_files.sealed(tensor_files.text_of(changed), body)
        own = refused(made)
        outcomes[own] += 1
        if not own:
            found, _ = read(made)
            assert [n for n in sorted(x.nbytes for x in found.values()) if n] == [n for n in sizes if n]
    assert outcomes[True] > 1000 and outcomes[False] > 5, outcomes


START = files.beginning(KIND) + files.BLANK.encode()
HOSTILE = {
    "no JSON": (START, "not JSON"),
    "deep": (START + b'"},"x":' + b"[" * 100_000, "not JSON"),
    "no text": (START + b'","x":"\xff"}}', "not JSON"),
    "no CRCs": (START + b'"}}', "a CRC for each tensor"),
    "other texts": (START + b'","crc32s":1}}', "a CRC for each tensor"),
    "texts twice": (START + b'","crc32s":""},"__metadata__":3}', "a CRC for each tensor"),
    "more CRCs": (START + b'","crc32s":"00000000"}}', "a CRC for each tensor"),
    "a CRC of other digits": (START + b'","crc32s":"0000000A"},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        "a CRC for each tensor"),
    "more than the file": (START + b'","crc32s":"00000000"},"x":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}',
        "is cut off"),
    "a hole": (START + b'","crc32s":"00000000"},"x":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}', "from 0 on"),
    "a size that wraps": (START + b'","crc32s":"00000000"},"x":{"dtype":"F32","shape":[281474976710656,65536],'
        b'"data_offsets":[0,0]}}', "cannot be"),
    "sizes without end": (START + b'","crc32s":"00000000"},"x":{"dtype":"F32","shape":['
        + b"281474976710656," * 300_000 + b'1],"data_offsets":[0,0]}}', "cannot be"),
    "no entry": (START + b'","crc32s":"00000000"},"x":3}', "cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_told(name):
    """A misleading header raises an error that says what is wrong in the header."""
    text, said = HOSTILE[name]
    data = tensor_files.sealed(text)
    with pytest.raises(files.FileError) as error:
        files.read_header(KIND, len(data), reader(data), 8)
    assert any(said in x for x in error.value.args)


def test_padding_is_zeros():
    """Padding that is not zeros raises, whatever CRCs the header has."""
    data = bytearray(written(SMALL))
    places, _ = files.read_header(KIND, len(data), reader(bytes(data)), 8)
    data[places["é"].offset - 1] = 1
    with pytest.raises(files.FileError, match="bytes between its tensors"):
        files.read_header(KIND, len(data), reader(bytes(data)), 8)
