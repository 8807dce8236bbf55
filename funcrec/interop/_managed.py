"""Loads the ids of TorchRec's managed collision modules into vocabularies, and writes them back.

    theirs: row(sorted_ids[k]) = mapping[k], every other id has row Z - 1      ours: row(id) = find(vocabulary, id)

A row moves with its id. Shapes: Z rows of a table of TorchRec, the last one for all ids that the module does not hold;
R rows for ids and one of unknown ids in a table here; D dim.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, replace, sure
from funcrec.interop._configs import from_configs
from funcrec.interop._places import is_optimizer, table_of
from funcrec.kinds import (
    DynamicTables,
    Vocabulary,
    VocabularyConfig,
    find,
    stored_problems,
    vocabulary,
    vocabulary_items,
    vocabulary_of,
)
from funcrec.tables import FeatureConfig, Initializer, TableConfig, draw_of

# The state of one module: its ids, their rows, what its policy knows of each id, and the number of its last step.
STATE = re.compile(r"(?:^|\.)([^.]+)\.(_mch_\w+|_hash_zch_\w+|_output_segments_tensor|_current_iter_tensor)$", re.ASCII)
IDS, ROWS, COUNTS, LAST = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts", "_mch_last_access_iter"
NOW, SEGMENTS, HASHED = "_current_iter_tensor", "_output_segments_tensor", "_hash_zch_identities"
FREE = torch.iinfo(torch.int64).max  # the id of a place without one
# What the policies need, and their names in TorchRec.
KNOWN: dict[Any, tuple[str, ...]] = {"lru": (LAST,), "lfu": (COUNTS,), "distance_lfu": (COUNTS, LAST)}
POLICIES: dict[str, Any] = {
    "LRU_EvictionPolicy": "lru",
    "LFU_EvictionPolicy": "lfu",
    "DistanceLFU_EvictionPolicy": "distance_lfu",
}

Load = Callable[..., Any]  # a state and a state dict -> a state, or a state dict


def is_managed(module: Any) -> bool:
    own = sys.modules.get("torchrec.modules.mc_embedding_modules")
    return own is not None and isinstance(module, own.BaseManagedCollisionEmbeddingCollection)


def from_managed(call: str, module: Any) -> dict[str, VocabularyConfig]:
    """Return a vocabulary without ids for each table of a collection, which has room for the ids that the table has."""
    inner, managed = module._embedding_module, module._managed_collision_collection._managed_collision_modules
    configs = inner.embedding_bag_configs() if hasattr(inner, "embedding_bag_configs") else inner.embedding_configs()
    weighted = inner.is_weighted() if hasattr(inner, "is_weighted") else False
    check(call, *(module_problems(n, managed[n]) for n in managed))
    tables, features = from_configs(call, configs, weighted)
    return {t.name: vocabulary_config(t, managed[t.name], [f for f in features if f.table == t.name]) for t in tables}


def vocabulary_config(t: TableConfig, module: Any, features: list[FeatureConfig]) -> VocabularyConfig:
    items, initializer = items_of(module.state_dict()), cast(Initializer, t.initializer)
    policy, capacity = POLICIES[type(module._eviction_policy).__name__], -(-5 * t.num_embeddings // 4)
    make = lambda: vocabulary(capacity, policy=policy, unknown=1, device=items["ids"].device)
    while (vocabulary_of(make(), items)[1][: items["count"]] < 0).any():  # a bucket is full
        capacity += -(-capacity // 8)
    if initializer.scale is None:  # it depends on the number of rows, which is another one here
        kind = "normal" if initializer.kind == "xavier_normal" else initializer.kind
        initializer = Initializer(kind, draw_of(initializer, t.num_embeddings, t.embedding_dim)[1])
    made = make()
    return VocabularyConfig(made, [replace(t, num_embeddings=made.num_embeddings, initializer=initializer)], features)


def load_managed(call: str, state: Any, state_dict: Mapping[str, Any], module: Mapping | None, load: Load) -> Any:
    """Return `state`, whose tables are dynamic, with the numbers and ids of a state dict. load: as for plain tables."""
    if is_optimizer(state_dict):
        return load_managed_slots(call, state, state_dict, module, load)
    tables, (managed, rest) = state.tables, apart(state_dict)
    check(call, given_problems(module), managed_problems(tables, managed, rest), known_problems(state))
    check(call, metadata_problems(tables, managed))
    loaded = load(as_theirs(state, managed), rest)
    made, held, of_table = dict(loaded.tables), dict(tables.vocabularies), vocabularies_of(tables)
    for n, own in managed.items():
        old, items = held[of_table[n]], items_of(own, tables.tables[n].device)
        held[of_table[n]], rows = vocabulary_of(old, items)
        check(call, room_problems(n, old, int((rows[: items["count"]] < 0).sum()), int(items["count"])))
        at, source = pairs_of(held[of_table[n]], own)
        made[n] = tables.tables[n].index_put((at,), loaded.tables[n][source])
    out = replace(loaded, tables=replace(tables, tables=made, vocabularies=held))
    return replace(out, slots=state.slots) if hasattr(state, "slots") else out


def load_managed_slots(call: str, state: Any, state_dict: Mapping[str, Any], module: Mapping | None, load: Load) -> Any:
    """Return `state` with an optimizer's state. module: the state dict that has the ids of its rows."""
    managed = of_module(call, state, module)
    loaded, slots = load(as_theirs(state, managed), state_dict), {}
    of_table = vocabularies_of(state.tables)
    for n, old in state.slots.items():
        slots[n] = dict(loaded.slots[n])
        if n in managed:
            at, source = pairs_of(state.tables.vocabularies[of_table[n]], managed[n])
            slots[n] = {k: x.index_put((at,), loaded.slots[n][k][source]) for k, x in old.items()}
    return replace(loaded, tables=state.tables, slots=slots)


def managed_like(
    call: str, state: Any, like_dict: Mapping[str, Any], module: Mapping | None, load: Load, to: Load
) -> dict[str, Any]:
    """Return the numbers and ids of `state`, whose tables are dynamic, in the form of a state dict. load, to: as for
    plain tables."""
    if is_optimizer(like_dict):
        return managed_slots_like(call, state, like_dict, module, load, to)
    tables, (managed, rest) = state.tables, apart(like_dict)
    check(call, given_problems(module), managed_problems(tables, managed, rest))
    of_table, plain, new = vocabularies_of(tables), dict(tables.tables), {}
    for n, own in managed.items():
        v, t = tables.vocabularies[of_table[n]], tables.tables[n]
        items = sorted_items(v)
        check(call, written_problems(n, items["ids"], own[IDS].shape[0]))
        new[n] = written(items, {k: x.to(t.device) for k, x in own.items()})
        theirs = next(x for k, x in rest.items() if table_of(k, tables.tables) == n).to(t.device, t.dtype)
        at, source = pairs_of(v, new[n])
        plain[n] = theirs.index_put((source,), t[at])
    out = to(replace(state, tables=plain), rest)
    return {k: out[k] if k in out else new[part[1]][part[2]].to(x.device, copy=True)
            for k, x in like_dict.items() for part in [cast(re.Match, STATE.search(k))]}  # fmt: skip


def managed_slots_like(
    call: str, state: Any, like_dict: Mapping[str, Any], module: Mapping | None, load: Load, to: Load
) -> dict[str, Any]:
    """Return an optimizer's state in the form of a state dict. Rows without an id keep their numbers."""
    managed = of_module(call, state, module)
    plain, of_table = load(as_theirs(state, managed), like_dict, step=int(state.step)), vocabularies_of(state.tables)
    slots = dict(state.slots)
    for n in [n for n in managed if n in slots]:
        at, source = pairs_of(state.tables.vocabularies[of_table[n]], managed[n])
        slots[n] = {k: plain.slots[n][k].index_put((source,), x[at]) for k, x in slots[n].items()}
    return to(replace(plain, slots=slots, dense_opt=state.dense_opt), like_dict)


def of_module(call: str, state: Any, module: Mapping | None) -> dict[str, dict[str, Any]]:
    """Return {table: the state of its module}, which has exactly the ids of the vocabularies of `state`."""
    check(call, optimizer_problems(state, module))
    managed, rest = apart(sure(module))
    check(call, managed_problems(state.tables, managed, rest))
    of_table = vocabularies_of(state.tables)
    for n, own in managed.items():
        v = state.tables.vocabularies[of_table[n]]
        check(call, same_problems(n, sorted_items(v)["ids"], own[IDS].to(v.tags.device)))
    return managed


def as_theirs(state: Any, managed: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Return the state with plain tables, and slots, of as many rows as TorchRec's. They have no numbers."""
    sizes = {n: own[IDS].shape[0] for n, own in managed.items()}
    sized = lambda n, x: x.new_empty(()).expand(sizes[n], *x.shape[1:]) if n in sizes else x
    plain = replace(state, tables={n: sized(n, t) for n, t in state.tables.items()})
    if not hasattr(state, "slots"):
        return plain
    return replace(plain, slots={n: {k: sized(n, x) for k, x in own.items()} for n, own in state.slots.items()})


def pairs_of(v: Vocabulary, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (the rows of a module's ids here, their rows there). The row of unknown ids is the last pair."""
    ids, rows = own[IDS].to(v.tags.device), own[ROWS].to(v.tags.device)
    is_id = ids != FREE
    at = torch.cat([find(v, ids[is_id]), rows.new_full((1,), v.capacity)])
    return at, torch.cat([rows[is_id], rows[-1:]])


def written(items: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a module with these ids.

    An id that the module holds already keeps its row there. Places without an id keep their order."""
    ids, known = items["ids"], own[IDS][:-1]
    at = torch.searchsorted(known, ids).clamp(max=max(0, known.shape[0] - 1))
    is_known = known[at] == ids if ids.shape[0] else ids > 0
    kept = own[ROWS][at[is_known]]
    free = own[ROWS][:-1][~torch.isin(own[ROWS][:-1], kept)]
    # Rows without an id come before rows of ids that are gone.
    free = free[torch.isin(free, own[ROWS][:-1][known != FREE]).long().argsort(stable=True)]
    num_new = int((~is_known).sum())
    rows = torch.zeros_like(ids).masked_scatter(is_known, kept).masked_scatter(~is_known, free[:num_new])
    rest, last = free[num_new:], own[ROWS][-1:]
    filled = lambda x, value, end: torch.cat([x, torch.full_like(rest, value), end])
    made = {
        IDS: filled(ids, FREE, last.new_full((1,), FREE)), ROWS: torch.cat([rows, rest, last]), SEGMENTS: own[SEGMENTS],
        NOW: items["now"][None],
    }  # fmt: skip
    return made | {k: filled(items[n], 0, own[k][-1:]) for k, n in ((COUNTS, "counts"), (LAST, "last")) if k in own}


# -- lists of ids ----------------------------------------------------------------------------------------------------


def items_of(own: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the ids of a module as `vocabulary_of` takes them. Without counts each count is 1, and without steps each
    age is 0."""
    ids, rows, now = (own[k].to(device or own[IDS].device) for k in (IDS, ROWS, NOW))
    ids, rows, now = ids[:-1].clone(), rows[:-1].clone(), now[0].clone()
    ages = now - own[LAST][:-1].to(ids.device) if LAST in own else torch.zeros_like(ids)
    counts = own[COUNTS][:-1].to(ids.device) if COUNTS in own else torch.ones_like(ids)
    return {"ids": ids, "rows": rows, "ages": ages, "counts": counts, "count": (ids != FREE).sum(), "now": now}


def sorted_items(v: Vocabulary) -> dict[str, Tensor]:
    """Return the ids of a vocabulary in ascending order, their rows, counts and last steps, and the present step."""
    items = vocabulary_items(v)
    own = {k: items[k][: items["count"]] for k in ("ids", "rows", "ages", "counts")}
    order = own["ids"].argsort()
    out = {k: x[order] for k, x in own.items()}
    return out | {"last": items["now"] - out.pop("ages"), "now": items["now"]}


def apart(state_dict: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return ({table: the state of its module}, all other entries)."""
    managed: dict[str, dict[str, Any]] = {}
    rest = {}
    for k, x in state_dict.items():
        if match := STATE.search(k):
            managed.setdefault(match[1], {})[match[2]] = x
        else:
            rest[k] = x
    return managed, rest


def vocabularies_of(tables: DynamicTables) -> dict[str, str]:
    """Return {table: the vocabulary that it follows}."""
    return {x[0]: x[1] for x in tables.first}


# -- validators ------------------------------------------------------------------------------------------------------


def module_problems(table: str, module: Any) -> Iterator[Problem]:
    """Report what a managed collision module does and a vocabulary does not."""
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    if not isinstance(module, MCHManagedCollisionModule):
        got, need = type(module).__name__, "an MCHManagedCollisionModule"
        hint = "an empty fr.vocabulary(capacity), whose ids come from a dict of ids and rows with fr.vocabulary_of"
        yield Problem(f"the module of table {table!r} has no counterpart.", got, need, hint, TypeError)
        return
    policy = cast(Any, module)._eviction_policy
    if type(policy).__name__ not in POLICIES:
        need, hint = f"one of {list(POLICIES)}", "fr.vocabulary(capacity, policy=score_fn, unknown=1)"
        yield Problem(
            f"the policy of table {table!r} has no counterpart.", type(policy).__name__, need, hint, TypeError
        )
    elif type(policy).__name__ == "DistanceLFU_EvictionPolicy" and policy._decay_exponent != 1:
        got, hint = f"decay_exponent={policy._decay_exponent}", "fr.vocabulary(capacity, policy=score_fn, unknown=1)"
        yield Problem(f"the policy of table {table!r} has no counterpart.", got, "decay_exponent=1", hint)
    given = {"threshold_filtering_func": policy._threshold_filtering_func, "input_hash_func": module._input_hash_func}
    hints = "fr.vocabulary(capacity, admit=2, unknown=1)", "the hash of the ids, before funcrec takes them"
    for (field, value), hint in zip(given.items(), hints):
        if value is not None:
            yield Problem(f"`{field}` of table {table!r} has no counterpart.", f"{value!r}", "None", hint)


def managed_problems(
    tables: DynamicTables, managed: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any]
) -> Iterator[Problem]:
    """Report tables whose ids the state dict lacks, ids of other tables, and states of modules that are not whole."""
    yield from stored_problems(tables)
    of_table = vocabularies_of(tables)
    for n in [n for n in of_table if n not in managed]:
        hint = "the state dict of a ManagedCollisionEmbeddingBagCollection; tables without a vocabulary"
        yield Problem(f"the state dict has no ids of table {n!r}.", f"ids of {list(managed)}", "ids of the table", hint,
                      KeyError)  # fmt: skip
    for n, own in managed.items():
        if n not in of_table:
            hint = "fr.dynamic_tables(tables, fr.interop.from_torchrec(module), key=key)"
            yield Problem(f"table {n!r} has ids in the state dict, and follows no vocabulary here.",
                          f"vocabularies of {list(of_table)}", "a vocabulary", hint, KeyError)  # fmt: skip
            continue
        v = tables.vocabularies[of_table[n]]
        sharing = [k for k, x in of_table.items() if x == of_table[n]]
        if len(sharing) > 1:
            need = "a vocabulary for each table"
            hint = "fr.interop.from_torchrec(module)"
            yield Problem(f"tables {sharing} share a vocabulary.", f"{of_table[n]!r}", need, hint)
        if v.unknown != 1:
            need, hint = "1: TorchRec has one row for unknown ids", "fr.vocabulary(capacity, unknown=1)"
            yield Problem(f"`unknown` of vocabulary {of_table[n]!r} is another.", f"{v.unknown!r}", need, hint)
        if not any(table_of(k, tables.tables) == n for k in rest):
            yield Problem(f"table {n!r} is not in the state dict.", f"{list(rest)}", "its rows", kind=KeyError)
        yield from state_problems(n, own)


def given_problems(module: Mapping | None) -> Iterator[Problem]:
    if module is not None:
        need, hint = "None: the state dict has its own ids", "module=..., for the state dict of an optimizer"
        yield Problem("`module` belongs to an optimizer's state dict.", describe(module), need, hint)


def optimizer_problems(state: Any, module: Mapping[Any, Any] | None) -> Iterator[Problem]:
    if module is None:
        need, hint = "the ids of its rows", "module=module.state_dict()"
        yield Problem("an optimizer's state dict does not say the ids of its rows.", "module=None", need, hint)
    elif not hasattr(state, "slots"):
        need = "a TrainState"
        yield Problem("the state dict belongs to an optimizer.", describe(state), need, "step.init(params)", TypeError)


def same_problems(n: str, ids: Tensor, theirs: Tensor) -> Iterator[Problem]:
    theirs = theirs[theirs != FREE]
    if not torch.equal(ids, theirs):
        got, need = f"{theirs.shape[0]} ids", f"the {ids.shape[0]} ids of its vocabulary"
        hint = "state = load_torchrec_state_dict(state, module), or module=to_torchrec_state_dict(state, module)"
        yield Problem(f"`module` has other ids of table {n!r} than `state`.", got, need, hint)


def unmanaged_problems(state_dict: Mapping[str, Any], module: Mapping | None) -> Iterator[Problem]:
    """Report ids of rows, for which plain tables have no place."""
    if module is not None:
        yield Problem("`module` requires tables with vocabularies.", describe(module), "None", "fr.dynamic_tables")
    if managed := apart(state_dict)[0]:
        hint = "fr.dynamic_tables(tables, fr.interop.from_torchrec(module), key=key)"
        need = "tables with vocabularies"
        yield Problem("the state dict has ids of rows.", f"ids of tables {list(managed)}", need, hint, TypeError)


def state_problems(n: str, own: Mapping[str, Any]) -> Iterator[Problem]:
    """Report the state of a module that is of another kind, cut over ranks, or not that of a whole table."""
    if HASHED in own:
        need, hint = "sorted ids of an MCHManagedCollisionModule", "training of the vocabulary from its beginning"
        yield Problem(f"the ids of table {n!r} are those of a HashZchManagedCollisionModule.", HASHED, need, hint)
    elif absent := [k for k in (IDS, ROWS, NOW, SEGMENTS) if k not in own]:
        need, hint = f"{absent}", "module.state_dict()"
        yield Problem(f"the state of the module of table {n!r} is not whole.", f"{list(own)}", need, hint, KeyError)
    elif strange := [k for k in own if k not in (IDS, ROWS, NOW, SEGMENTS, COUNTS, LAST)]:
        yield Problem(f"the policy of table {n!r} has no counterpart.", f"{strange}", f"{COUNTS} and {LAST} alone",
                      "a policy of TorchRec's: LFU, LRU or DistanceLFU")  # fmt: skip
    elif cut := [k for k, x in own.items() if not isinstance(x, Tensor) or hasattr(x, "to_local")]:
        hint = "a state dict of the module before it is sharded"
        yield Problem(f"the ids of table {n!r} are cut over ranks.", f"{cut}", "whole tensors", hint, TypeError)
    else:
        ids, rows = own[IDS], own[ROWS]
        count, num_rows = int((ids != FREE).sum()), ids.shape[0]
        is_mapping = rows.shape == ids.shape and rows.sort().values.equal(torch.arange(num_rows, device=rows.device))
        if not num_rows or not is_mapping or int(rows[-1]) != num_rows - 1 or int(ids[-1]) != FREE:
            need = f"each of {num_rows} rows once, the last one for unknown ids"
            yield Problem(f"the rows of table {n!r} are not those of a whole table.", describe(rows), need,
                          "the state dict of an unsharded module")  # fmt: skip
        elif not bool((ids[:count].diff() > 0).all()) or bool((ids[:count] == FREE).any()):
            hint = "module.state_dict(), after load_state_dict"
            yield Problem(f"the ids of table {n!r} are not sorted.", describe(ids), "ascending ids", hint)


def metadata_problems(tables: DynamicTables, managed: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    of_table = vocabularies_of(tables)
    for n, own in managed.items():
        policy = tables.vocabularies[of_table[n]].policy
        if absent := [k for k in KNOWN.get(policy, ()) if k not in own]:
            hint = "fr.interop.from_torchrec(module), which chooses the policy of the module"
            yield Problem(f"vocabulary {of_table[n]!r} has another policy than the state dict.", f"no {absent}",
                           f"what {policy!r} needs", hint)  # fmt: skip


def known_problems(state: Any) -> Iterator[Problem]:
    """Report slots that belong to ids: the state dict of a module has none of the new ids."""
    if hasattr(state, "slots") and any(state.slots.values()):
        held = {n: int(v.num_ids) for n, v in state.tables.vocabularies.items() if int(v.num_ids)}
        if held:
            need, hint = (
                "vocabularies without ids, or Params",
                "step.init(load_torchrec_state_dict(params, state_dict))",
            )
            yield Problem("the slots of `state` belong to other ids.", f"ids {held}", need, hint)


def room_problems(n: str, v: Vocabulary, lost: int, count: int) -> Iterator[Problem]:
    if lost:
        hint = "fr.interop.from_torchrec(module), which chooses a vocabulary with room for all"
        yield Problem(f"{lost} of {count} ids of table {n!r} find their bucket full.", f"{v!r}", "a row for each", hint)


def written_problems(n: str, ids: Tensor, num_rows: int) -> Iterator[Problem]:
    if ids.shape[0] > num_rows - 1:
        got, need = f"{ids.shape[0]} ids", f"at most {num_rows - 1}, and a row for unknown ids"
        yield Problem(f"the module of table {n!r} has too few rows.", got, need, f"zch_size={ids.shape[0] + 1}")
    elif bool((ids == FREE).any()):
        yield Problem(f"table {n!r} has an id that marks a free place in TorchRec.", f"{FREE}", f"ids below {FREE}")
