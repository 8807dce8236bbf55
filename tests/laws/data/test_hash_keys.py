"""hash_keys: ids of text that are the same everywhere."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.data import hash_keys

MASK = 2**64 - 1


def mixed(z: int) -> int:
    """Return SplitMix64's finaliser (Steele, Lea and Flood, 2014) of a number of 64 bits."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def written_out(key: str) -> int:
    """Return the id of a key in Python's integers: a mixed sum of a number for each byte and its place."""
    terms = (mixed((256 * place + byte + 1) * 0x9E3779B97F4A7C15 & MASK) for place, byte in enumerate(key.encode()))
    found = mixed(sum(terms) & MASK)
    return found - 2**64 if found >= 2**63 else found


@given(st.lists(st.text(max_size=40), max_size=20))
def test_an_id_follows_from_the_bytes_of_the_key_alone(keys):
    """The id of a key is that of the formula, in any column: text or bytes, of NumPy or pyarrow, cut or in chunks."""
    ids = hash_keys(keys)
    assert ids.dtype == torch.int64 and ids.tolist() == [written_out(k) for k in keys]
    column = pa.array(["other", *keys], pa.large_string())
    forms = [[k.encode() for k in keys], pa.array(keys, pa.string()), column[1:], np.array(keys, object)]
    forms.append(pa.chunked_array([keys[:3], [], keys[3:]], pa.string()))
    for form in forms if keys else forms[1:3]:
        assert torch.equal(hash_keys(form), ids)
    if not any(k.endswith("\0") for k in keys):  # numpy keeps no such text
        assert not keys or torch.equal(hash_keys(np.array(keys)), ids)


def test_a_text_of_numpy_with_a_nul_is_whole():
    """Texts and bytes of numpy that differ after a NUL have different ids, also as a column of a table."""
    texts = np.array(["a\0b", "a\0c", "a", "\0", "longer"])
    for own in (texts, texts.astype("S"), texts.astype(">U6"), texts[::2], texts[:0]):
        assert torch.equal(hash_keys(own), hash_keys(own.tolist()))
    assert hash_keys(texts[:3]).unique().shape[0] == 3
    schema = fr.data.Schema(categorical=("key",))
    assert str(fr.data.fit_encoding({"key": texts}, schema)) == "Encoding({key: 6}, dense=())"


def test_different_keys_have_different_ids():
    """300,000 keys that differ by little, among them the empty one, have different ids, with each bit set in half."""
    keys = ["", *(f"user-{i}" for i in range(200_000)), *(f"{i}" for i in range(99_999))]
    ids = hash_keys(keys)
    assert ids.unique().shape[0] == len(keys)
    share = torch.stack([(ids >> bit) & 1 for bit in range(64)]).double().mean(1)
    assert ((share - 0.5).abs() < 0.005).all()


def test_a_vocabulary_takes_the_ids():
    """New keys get rows, and a later batch with the same keys finds them."""
    vocabulary, rows, _ = fr.admit(fr.vocabulary(128), hash_keys(["anna", "bob", "anna"]))
    assert rows[0] == rows[2] != rows[1]
    assert torch.equal(
        fr.find(vocabulary, hash_keys([b"bob", b"anna", b"carl"])),
        torch.stack([rows[1], rows[0], -torch.ones_like(rows[0])]),
    )


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        ([1, 2], TypeError, "the integers themselves"),
        ([["a"]], TypeError, "lists"),
        (["a", None], ValueError, "row 1, column `column` cannot be read"),
        ([1.5], TypeError, "values of another kind"),
        ("anna", TypeError, "`column` is not a column"),
    ],
)
def test_other_columns_are_refused(column, kind, said):
    """Integers, lists, numbers, one text and missing keys raise."""
    with pytest.raises(kind, match=r"^funcrec\.data\.hash_keys: ") as raised:
        hash_keys(column)
    assert said in str(raised.value)
