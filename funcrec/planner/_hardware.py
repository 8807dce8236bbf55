"""Hardware: the memory and the speeds of a rank. Estimates divide bytes by these speeds.

    seconds = latency + bytes / bytes per second

Hardware is a plain value, so that a plan for a thousand devices needs no device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from funcrec.core import (
    Count,
    Magnitude,
    PositiveMagnitude,
    Problem,
    Size,
    check,
    describe,
    field_problems,
    plain_numbers,
    typed,
)  # fmt: skip
from funcrec.mesh import Mesh
from funcrec.sharding import Plan

GB = 10**9
CUDA_LAUNCH_S = 10e-6
Known = Literal["h100", "h200", "a100", "cpu"]


@plain_numbers
@dataclass(frozen=True)
class Hardware:
    """The memory and the links of a rank.

    Args:
      name: the name of the kind of hardware, for messages.
      memory_bytes: the memory of the device of a rank.
      memory_bytes_per_s: the speed at which the device reads and writes rows.
      link_bytes_per_s: the speed from a rank to the ranks of its host, in one direction.
      host_bytes_per_s: the speed from a rank to ranks of other hosts, in one direction.
      ranks_per_host: the number of consecutive ranks on a host. The last axis of the mesh runs fastest.
      link_latency_s, host_latency_s: the cost of an exchange in addition to its bytes, within a host and between hosts.
      launch_s: the cost of a bank in addition to its bytes, for the calls that look up and update rows.
      disk_bytes, disk_records_per_s: the size of a rank's disk for the stores of tables larger than memory, and the
        number of records that the rank reads there, each with one that it writes back, in a second. 0 for no disk:
        all tables are whole in memory.

    Example:
      >>> import funcrec as fr
      >>> fr.Hardware.named("h100").ranks_per_host
      8
      >>> fr.Hardware("mine", memory_bytes=16 * 10**9, memory_bytes_per_s=2e11, link_bytes_per_s=1e10,
      ...     host_bytes_per_s=1e9, ranks_per_host=4).memory_bytes
      16000000000

    Source: vendors' data sheets: NVIDIA H100 SXM, H200 SXM and A100 SXM 80 GB, NVLink 4 and 3 (half of the figure for
    both directions), one network card of 400 or 200 Gb/s for each; TorchRec's Topology. Latencies: NCCL's own model
    (src/graph/tuning.cc, rings, simple protocol: 8.4 us plus 3.4 for a step of NVLink or 14.0 of the network).
    launch_s: bench/results/cuda, where a recorded step of 26 tables takes 0.57 ms in all; for "cpu", measured on two
    gloo ranks.
    """

    name: str
    memory_bytes: Count
    memory_bytes_per_s: PositiveMagnitude
    link_bytes_per_s: PositiveMagnitude
    host_bytes_per_s: PositiveMagnitude
    ranks_per_host: Count = 8
    link_latency_s: Magnitude = 0.0
    host_latency_s: Magnitude = 0.0
    launch_s: Magnitude = 0.0
    disk_bytes: Size = 0
    disk_records_per_s: Magnitude = 0.0

    def __post_init__(self) -> None:
        check("funcrec.Hardware", field_problems(self))

    @staticmethod
    @typed
    def named(name: Known) -> "Hardware":
        """Return a known kind of hardware. "cpu" is one core with its share of a server.

        Example:
          >>> import funcrec as fr
          >>> fr.Hardware.named("cpu").ranks_per_host
          2
        """
        return KNOWN[name]

    @staticmethod
    @typed
    def measure(mesh: Mesh, *, memory_bytes: Count | None = None) -> "Hardware":
        """Return the measured hardware of the ranks of a mesh.

        Every rank calls it, and all ranks get the numbers of the slowest rank. It looks up and updates a table of 64
        MiB and a table of a few rows, and exchanges 8 MiB, and one number, with all ranks of the last axis. On CUDA
        launch_s is the launch_s of the H100, because calls of a recorded step cannot be timed one by one.

        Args:
          memory_bytes: the memory of a rank; None asks the device, or on CPUs takes a rank's share of the machine.

        Cost: about a second.

        Example:
          >>> import funcrec as fr
          >>> fr.Hardware.measure(fr.Mesh.emulated(data=2), memory_bytes=10**9).name
          'measured'
        """
        from funcrec.planner._measure import measured  # `_measure` counts bytes with `_costs`

        found = measured(mesh)
        if memory_bytes is not None:
            found["memory_bytes"] = memory_bytes
        return Hardware("measured", **found)

    @staticmethod
    @typed
    def from_run(
        runs: Sequence[tuple[Sequence[Mapping[str, Any]], Plan]], *, hardware: Any, rest_s: Magnitude | None = None
    ) -> "Hardware":
        """Return hardware whose rates agree with measured steps.

            seconds of a step = rest_s + own · (lookup + update) + exchange · (exchange)

        The estimates on the right are those of a run's plan, each of its slowest rank. The left side is 1 / the median
        of the history's "steps_per_s"; no other column is read. The factors have the least squares of relative errors.
        `own` divides memory_bytes_per_s and multiplies launch_s. `exchange` divides both link speeds and multiplies
        both latencies, because a plan does not estimate them separately. Memory and disk stay.

        Args:
          runs: (history of `fr.fit`, the plan of the run) for each run. The plans are those of `fr.plan` for
            `hardware`; a plan made by hand is rated by `fr.plan(placements=...)`.
          hardware: the hardware of the plans' estimates, a Hardware or "h100", "h200", "a100", "cpu".
          rest_s: the seconds of a step without its tables. None learns them too, so one more run is needed.

        Raises:
          ValueError: if the runs say nothing about a factor: fewer runs than unknowns, or estimates in one proportion;
            or if steps become faster where the estimate becomes slower.

        Law: if the steps of runs take the estimates for some hardware, and `rest_s`, that hardware is learnt.

        Example:
          >>> import funcrec as fr
          >>> tables, features = (fr.TableConfig("item", 10**6, 64),), (fr.FeatureConfig("item", table="item"),)
          >>> plan = fr.plan(tables, features, {"model": 1}, batch_size=4096, hardware="cpu")
          >>> history = [{"steps_per_s": 1 / (0.01 + 2 * plan.report.seconds)}]
          >>> learnt = fr.Hardware.from_run([(history, plan)], hardware="cpu", rest_s=0.01)
          >>> round(learnt.memory_bytes_per_s / 1e9, 3)  # half of 10
          5.0
        """
        from funcrec.planner._learnt import learnt  # `_learnt` makes Hardware

        check("funcrec.Hardware.from_run", known_problems(hardware))
        return learnt(runs, KNOWN[hardware] if isinstance(hardware, str) else hardware, rest_s)


# -- those that are known -------------------------------------------------------------------------------------------


KNOWN = {
    "h100": Hardware("h100", 80 * GB, 3.35e12, 450e9, 50e9, 8, 11.8e-6, 22.4e-6, CUDA_LAUNCH_S),
    "h200": Hardware("h200", 141 * GB, 4.8e12, 450e9, 50e9, 8, 11.8e-6, 22.4e-6, CUDA_LAUNCH_S),
    "a100": Hardware("a100", 80 * GB, 2.04e12, 300e9, 25e9, 8, 11.8e-6, 22.4e-6, CUDA_LAUNCH_S),
    "cpu": Hardware("cpu", 16 * GB, 10e9, 1e9, 1e9, 2, 2e-4, 2e-4, 1.6e-4),
}


# -- validators --------------------------------------------------------------------------------------------------


def known_problems(hardware: Any) -> Iterator[Problem]:
    is_name = isinstance(hardware, str)
    if not isinstance(hardware, Hardware) and not (is_name and hardware in KNOWN):
        got, need = repr(hardware) if is_name else describe(hardware), f"a Hardware, or one of {list(KNOWN)}"
        yield Problem("`hardware` is unknown.", got, need, kind=ValueError if is_name else TypeError)
