"""Models of MovieLens-1M: six as the RecBole benchmark `ml-1m_context` defines them, and DIN.

    z = b + Σ_f v_f [+ fm(e)] [+ mlp(e)],   7 features, dim 16

Six columns of one id each share one table. So the ids of a column are offset by the vocabularies of the columns before
it. Genres are a bag of up to six ids. DIN also reads the bag "history" of item ids.
"""

from typing import Any, Literal

from torch import Tensor

from funcrec import nn
from funcrec.core import remade, typed
from funcrec.models._dcn import dcnv2
from funcrec.models._deep import deepfm, wide_deep
from funcrec.models._din import din
from funcrec.models._dlrm import dlrm
from funcrec.models._model import Model, linear_twins
from funcrec.models._shallow import fm, lr
from funcrec.tables import FeatureConfig, Params, TableConfig, xavier_normal

ML1M_FIELDS = {"user_id": 6041, "item_id": 3884, "age": 8, "gender": 3, "occupation": 22, "release_year": 82}
ML1M_GENRES = 19
ML1M_DIM = 16
MAX_GENRES = 6
DCNV2 = {
    "num_cross": 2, "dropout": 0.2, "batch_norm": True, "cross_penalty": 1.0, "cross_weight": nn.normal(1.0),
}  # fmt: skip
DIN = {"attention": (36,), "sizes": (256, 256, 256), "dropout": 0.1}


@remade
@typed
def ml1m(name: Literal["lr", "fm", "dlrm", "widedeep", "deepfm", "dcnv2", "din"]) -> Model:
    """Return the benchmark's model `name`: "lr", "fm", "dlrm" (inner-product PNN), "widedeep", "deepfm" or "dcnv2"; or
    "din", which is "widedeep" with attention to a history that the benchmark does not have.

    A batch has the keys "user_id", "item_id", "age", "gender", "occupation" and "release_year" (ids with offsets into
    one table of 10,040 rows), "genre" (ids 1 ... 18), and for "din" also "history" (ids like those of "item_id"). As in
    RecBole, every model has the embeddings, the first-order weights and the bias, even those that it does not read. The
    published parameter counts include all of these.

    Raises:
      ValueError: the name is unknown.

    Example:
      >>> import funcrec as fr
      >>> [fr.models.num_parameters(fr.models.ml1m(n).init(fr.key(0))) for n in ("fm", "dlrm", "dcnv2")]
      [171004, 337149, 292317]

    Source: RUCAIBox/RecBole, benchmark/md/ml-1m_context.md.
    """
    single = [FeatureConfig(field, table="fields", max_length=1) for field in ML1M_FIELDS]
    features = (*single, FeatureConfig("genre", table="genre", pooling="mean", max_length=MAX_GENRES))
    deep = (
        TableConfig("fields", sum(ML1M_FIELDS.values()), ML1M_DIM, initializer=xavier_normal()),
        TableConfig("genre", ML1M_GENRES, ML1M_DIM, initializer=xavier_normal()),
    )
    wide, linear = linear_twins(deep, features)
    history = [FeatureConfig("history", table="fields", pooling="none")]
    tables, sizes = deep + wide, (256, 256, 256)
    models = {
        "lr": lambda: lr(tables, linear),
        "fm": lambda: fm(tables, features, linear=linear),
        "dlrm": lambda: with_bias(dlrm(tables, features, sizes=sizes, dropout=0.1)),
        "widedeep": lambda: wide_deep(tables, features, linear=linear, sizes=sizes, dropout=0.2),
        "deepfm": lambda: deepfm(tables, features, linear=linear, sizes=sizes, dropout=0.1),
        "din": lambda: din(tables, features, history=history, target=["item_id"], linear=linear, **DIN),
        "dcnv2": lambda: with_bias(dcnv2(tables, features, sizes=(256, 256), **DCNV2)),
    }
    return models[name]()


def with_bias(model: Model) -> Model:
    """Return the model with a parameter dense["bias"], which the model does not read. RecBole's models without first
    order have it too."""

    def init(key: Tensor) -> Params:
        params = model.init(key)
        dense: dict[str, Any] = {"bias": nn.zeros(key, (1,)), **params.dense}
        return Params(params.tables, dense)

    return model._replace(init=init)
