"""What an HSTU ranker keeps of users, in bags or padded, so that a client or a cache can hold it between requests.

    score(params, from_padded(**to_padded(history, L)), batch) = score(params, history, batch)

Shapes: B users, K layers, L positions, H heads, D dim of keys, V dim of values.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import Count, Form, Problem, check, describe, kind_of, pytree, replace, typed
from funcrec.jagged import JaggedTensor, is_concrete
from funcrec.nn import Kept

CALL = "funcrec.models.History"
Keys = Annotated[Tensor, Form("f[B, K, L, H, D]")]
Values = Annotated[Tensor, Form("f[B, K, L, H, V]")]
Lengths = Annotated[Tensor, Form("i[B]")]
Times = Annotated[Tensor, Form("x[B, L]")]


@pytree(optional=("last", "fits"))
class History:
    """What `encode_history` keeps of each user.

    Args:
      layers: the keys and values of each layer.
      last: f[B, D], the normed output of the last position; 0 for a user without positions. None if it is not kept.
      fits: whether the columns of each user's history fit each other, B bools. None if `encode_history` has checked it.
    """

    layers: list[Kept]
    last: Tensor | None = None
    fits: Tensor | None = None

    @typed
    def to_padded(self, length: Count) -> dict[str, Tensor]:
        """Return the keys and values with a row for each user, as a package answers them.

        Args:
          length: L, the most positions of a user: those of the history, and one for each feature of the context.

        Returns:
          {name: [B, ...]}: the "keys" f[B, K, L, H, D] and "values" f[B, K, L, H, V], the "lengths" i[B], and "time",
          [B, L], if the model reads times. The padding is 0. `from_padded` reads them in a later request. They belong
          to the parameters that made them: a client drops them when the version of the package changes.

        Raises:
          ValueError: a user has more positions. If that cannot be read (under `jit`, in a package), the user has length
            -1 and keys of NaN instead. So has a user whose columns do not fit each other.

        Example:
          >>> import torch, funcrec as fr
          >>> bags = fr.JaggedTensor.from_lists([torch.ones(2, 1, 3), torch.ones(1, 1, 3)])
          >>> history = fr.models.History([fr.nn.Kept(bags, torch.ones(3, 1, 4))])
          >>> {name: tuple(x.shape) for name, x in history.to_padded(5).items()}
          {'keys': (2, 1, 5, 1, 3), 'values': (2, 1, 5, 1, 4), 'lengths': (2,)}
        """
        check(f"{CALL}.to_padded", layer_problems(self.layers))
        first = self.layers[0]
        lengths, at = first.keys.lengths, (-1, 1, 1, 1, 1)
        fits = lengths <= length
        if is_concrete(fits):
            check(f"{CALL}.to_padded", long_problems(lengths, length))
        fits = fits if self.fits is None else fits & self.fits
        padded = lambda kept, x: replace(kept.keys, values=x).to_padded(length)
        keys = torch.stack([padded(kept, kept.keys.values) for kept in self.layers], 1)
        out = {
            "keys": torch.where(fits.view(at), keys, torch.nan),
            "values": torch.stack([padded(kept, kept.values) for kept in self.layers], 1),
            "lengths": torch.where(fits, lengths, -1),
        }
        return out if first.times is None else {**out, "time": padded(first, first.times)}

    @staticmethod
    @typed
    def from_padded(keys: Keys, values: Values, lengths: Lengths, time: Times | None = None) -> "History":
        """Return the History of keys f[B, K, L, H, D], values f[B, K, L, H, V], lengths i[B] and times [B, L].

        Raises:
          ValueError: a length is not in [0, L]. If that cannot be read, the scores of such a user are NaN instead.
        """
        fits = (lengths >= 0) & (lengths <= keys.shape[2])
        is_read = is_concrete(fits)
        lengths = lengths if is_read else torch.where(fits, lengths, 0)
        bags = lambda x: JaggedTensor.from_padded(x, lengths)
        times = None if time is None else bags(time).values
        layers = [Kept(bags(k), bags(v).values, times) for k, v in zip(keys.unbind(1), values.unbind(1), strict=True)]
        return History(layers, fits=None if is_read else fits)


HISTORY = kind_of(History)


# -- validators --------------------------------------------------------------------------------------------------


def layer_problems(layers: object) -> Iterator[Problem]:
    if not isinstance(layers, list | tuple) or not layers or not all(isinstance(x, Kept) for x in layers):
        need, hint = "one fr.nn.Kept or more", "model.encode_history(params, batch)"
        yield Problem("`layers` are not the keys and values of layers.", describe(layers), need, hint, TypeError)


def long_problems(lengths: Tensor, length: int) -> Iterator[Problem]:
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > length:
        got, need = f"{longest} positions; length is {length}", "length >= the positions of each user"
        yield Problem("a history is longer than `length`.", got, need, f"length={longest}")
