"""Configs are frozen, hashable values."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given

import funcrec as fr
from funcrec.testing import strategies as frs


@given(frs.table_configs())
def test_equal_tables_hash_alike(tables):
    """A config equals its copy and has the hash of the copy. A config can therefore be part of a compile key."""
    for t in tables:
        copy = dataclasses.replace(t)
        assert copy == t and hash(copy) == hash(t) and pickle.loads(pickle.dumps(t)) == t
        assert t.shape == (t.num_embeddings, t.embedding_dim)


@given(frs.table_configs().flatmap(frs.feature_configs))
def test_equal_features_hash_alike(features):
    """A feature equals its copy and has the hash of the copy, even with a hash function."""
    for f in features:
        copy = dataclasses.replace(f)
        assert copy == f and hash(copy) == hash(f) and pickle.loads(pickle.dumps(f)) == f


def test_a_feature_reads_its_column():
    """`key` is the column, or the name if the feature has no column."""
    assert fr.FeatureConfig("f", table="t").key == "f"
    assert fr.FeatureConfig("f", table="t", column="c").key == "c"


def test_configs_are_frozen():
    """Fields cannot be set."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        fr.TableConfig("t", 1, 1).embedding_dim = 2


def test_any_dim_and_dtype():
    """embedding_dim may be any integer from 1. Tables are f32, f16, bf16 or f64."""
    for dim, dtype in [(1, torch.float32), (7, torch.float16), (33, torch.bfloat16), (130, torch.float64)]:
        assert fr.TableConfig("t", 3, dim, dtype=dtype).shape == (3, dim)
