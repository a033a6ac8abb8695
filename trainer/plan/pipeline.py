"""The part of the plan on a pipeline: work of each stage, the bubble, and the schedule as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer.config import Config
from trainer.config.recompute import recomputed_parts
from trainer.config.stages import chunk_layers, training_schedule
from trainer.errors import UserError
from trainer.parallel.schedule import Action, Cost, Schedule, Timeline, keys_of_slice, max_in_flight, simulate
from trainer.plan.flops import Operator, Products, decoder_products

_MOST_SIMULATED = 4  # times the stages: with more micro-batches the middle of the schedule repeats itself
_MOST_DRAWN = 16  # micro-batches
_COLOURS = {
    "forward": ("#9ecae1", "#4292c6", "#2171b5", "#08519c"),  # blues
    "backward": ("#c7e9c0", "#74c476", "#31a354", "#006d2c"),  # greens
}


@dataclass(frozen=True)
class StagePlan:
    """The load of one pipeline stage.

    Attributes:
        in_flight: Most forward passes, over all of its chunks, whose activations wait for their backward pass; of
            slices, if sequences are cut.
        share: Its estimated share of the computation of a step.
    """

    in_flight: int
    share: float


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a job: its stages, micro-batches and bubble.

    Attributes:
        scheduler: The order of passes, as `pipeline_config.pipeline_scheduler` names it.
        chunks: Model chunks of each stage.
        bubble_share: Estimated share of a step in which a stage waits for others, mean over the stages. Sending is
            assumed to take no time.
        even_bubble_share: The bubble if all passes took the same time: (p - 1) / (v m + p - 1) for p stages of v
            chunks and m micro-batches, or slices of them.
    """

    scheduler: str
    micro_batches: int
    chunks: int
    stages: tuple[StagePlan, ...]
    bubble_share: float
    even_bubble_share: float


def pipeline_plan(config: Config, stages: int) -> PipelinePlan | None:
    """Returns the plan of the pipeline, or None for a job without one."""
    if stages == 1:
        return None
    chunks = config.decoder.pp_interleave_num
    micro_batches = config.parallel_config.micro_batch_num
    busy = [sum(cost.forward + cost.backward for cost in row) for row in _chunk_costs(config)]
    schedule = training_schedule(config, stages, micro_batches, most=_MOST_SIMULATED * stages)
    plans = tuple(StagePlan(max_in_flight(schedule, s), time / sum(busy)) for s, time in enumerate(busy))
    step_time = _step_time(partial(training_schedule, config, stages), stages, micro_batches, _action_costs(config))
    order = config.parallel.pipeline_config
    even = (stages - 1) / (chunks * micro_batches * order.slices + stages - 1)
    bubble = 1 - sum(busy) * micro_batches / stages / step_time
    return PipelinePlan(order.pipeline_scheduler, micro_batches, chunks, plans, bubble, even)


def _step_time(
    schedule: Callable[[int], Schedule], stages: int, micro_batches: int, cost: Callable[[int, Action], Cost]
) -> float:
    """Returns the estimated time of a step, in floating-point operations of a token.

    A long schedule is not simulated in full: each further `stages` micro-batches take the time of those before them.
    """

    def simulated_time(number: int) -> float:
        """Returns the time of a step with this number of micro-batches, in the unit of `cost`."""
        return simulate(schedule(number), cost).end

    most = _MOST_SIMULATED * stages + micro_batches % stages
    if micro_batches <= most + stages:
        return simulated_time(micro_batches)
    before = simulated_time(most)
    return before + (micro_batches - most) / stages * (simulated_time(most + stages) - before)


def closed_form_time(times: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Returns about the time of a step of 1F1B without simulating it, for a search through many layouts.

    A stage begins when the first micro-batch has passed those before it, and ends before they have passed the last one
    back. In between it takes all m micro-batches, and waits twice: until the stages behind it have passed the first
    micro-batch back, and the last one. Meanwhile it does forward, or backward, passes of others, as many as there are
    stages behind it. The stage that takes longest decides. Several chunks v divide all but the passes themselves.

    For equal stages t this is exactly (m + (p - 1) / v) t, the time of Narayanan et al. 2021, section 2.2. With one
    chunk `simulate` finds at most 1 % more for stages that differ by some 30 %, with several at most an eighth less.

    Args:
        times: Of each stage: forward and backward pass of a micro-batch. The forward pass takes a third of it.
    """
    slowest = 0.0
    for stage, time in enumerate(times):
        behind = sum(times[stage + 1 :])
        passes = len(times) - stage - 1
        waits = max(0.0, behind - passes * time / 3) + max(0.0, behind - passes * time * 2 / 3)
        slowest = max(slowest, micro_batches * time + (sum(times[:stage]) + waits) / chunks)
    remainder = micro_batches % len(times)
    if chunks > 1 and remainder:  # they follow when the others have left the pipeline
        slowest += (len(times) - 1 - (remainder - 1) * (1 - 1 / chunks)) * max(times)
    return slowest


def _action_costs(config: Config) -> Callable[[int, Action], Cost]:
    """Returns a function that computes the operations of an action, as a share of those of its micro-batch's tokens.

    Slices have equal numbers of tokens, and later ones attend to more keys.
    """
    every = _chunk_costs(config)
    slices = config.parallel.pipeline_config.slices
    if slices == 1:
        return lambda stage, action: every[stage][action.chunk]
    attention = _chunk_costs(config, {"attention"})

    def cost(stage: int, action: Action) -> Cost:
        """Returns the operations of a slice: its share of products, and attention by its keys."""
        more = keys_of_slice(action.slice_number, slices) - 1
        pairs = zip(every[stage][action.chunk], attention[stage][action.chunk], strict=True)
        return Cost(*((of_all + more * of_attention) / slices for of_all, of_attention in pairs))

    return cost


def _chunk_costs(
    config: Config, operators: Collection[Operator] = ("products", "experts", "attention")
) -> list[list[Cost]]:
    """Returns [stages][chunks] floating-point operations of a token, see `trainer.plan.flops`; the last has the head.

    A backward pass also computes the forward pass of what it recomputes.

    Args:
        operators: The classes of operators that count.
    """
    again = recomputed_parts(config)
    layers, ends = decoder_products(config)

    def chunk_cost(numbers: Sequence[int], others: Sequence[Products] = ()) -> Cost:
        """Returns the forward and backward cost of some layers, and of products outside of layers."""
        products = [(each, again[number] in ("block", each.sublayer)) for number in numbers for each in layers[number]]
        products += [(each, False) for each in others]
        products = [(each, is_again) for each, is_again in products if each.operator in operators]
        forward = sum(each.forward for each, _ in products)
        backward = sum(each.flops - each.forward + each.forward * is_again for each, is_again in products)
        return Cost(forward, backward)

    rows = chunk_layers(config)
    costs = [[chunk_cost(numbers) for numbers in row] for row in rows]
    modules = range(config.decoder.num_layers, len(layers))
    costs[-1][-1] = chunk_cost([*rows[-1][-1], *modules], ends)
    return costs


def draw_schedule(config: Config, plan: PipelinePlan | None, picture: Path) -> str:
    """Returns the schedule as text for a terminal, and draws it as a PNG file.

    Raises:
        UserError: The job has no pipeline, or the picture cannot be written.
    """

    def problem(rule: str, fix: str) -> UserError:
        return UserError(rule, where="flag --schedule", key="--schedule", value=str(picture), fix=fix)

    if plan is None:
        raise problem("this job has no pipeline to draw", "set parallel_config.pipeline_stage, in a job of some ranks")
    if picture.suffix.lower() != ".png":
        raise problem("names a PNG file", "write for example schedule.png")
    stages = len(plan.stages)
    micro_batches = plan.micro_batches
    chunks = plan.chunks
    drawn = min(micro_batches, max(_MOST_DRAWN // stages, 2) * stages)
    schedule = training_schedule(config, stages, drawn)
    timeline = simulate(schedule, _action_costs(config))
    title = f"{stages} stages, {drawn} micro-batches"
    waits = f"; stages wait {timeline.bubble_share:.0%} of the time"
    if drawn < micro_batches:
        title += f" where a step has {micro_batches}"
        waits += f", with {micro_batches} micro-batches {plan.bubble_share:.0%}"
    if chunks > 1:
        title += f", {chunks} chunks a stage"
    try:
        _draw_picture(schedule, timeline, title + waits, picture)
    except OSError as error:
        raise problem(f"cannot be written: {error.strerror or error}", "name another file") from None
    key = "F3 forward, B3 backward pass of micro-batch 3 (from 0); a backward pass takes two slots"
    if chunks > 1:
        key += "; a, b, ... are the chunks of a stage"
    return "\n".join([f"{title}: {key}", "", *_schedule_lines(schedule)])


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    """Yields a line of text for each stage with a column for each slot of time.

    A forward pass takes one slot, a backward pass two.
    """
    timeline = simulate(schedule)
    end = int(timeline.end)
    width = 1 + max(len(_label(slot.action, schedule.chunks)) for slots in timeline.slots for slot in slots)
    digits = len(str(schedule.stages - 1))
    for stage, slots in enumerate(timeline.slots):
        cells = ["."] * end
        for slot in slots:
            for column in range(int(slot.start), int(slot.end)):
                cells[column] = _label(slot.action, schedule.chunks)
        yield f"stage {stage:<{digits}}  " + "".join(f"{cell:<{width}}" for cell in cells).rstrip()


def _label(action: Action, chunks: int) -> str:
    label = f"{action.kind[0].upper()}{action.micro_batch}"
    if chunks == 1:
        return label
    if chunks <= 26:
        return label + chr(ord("a") + action.chunk)
    return f"{label}/{action.chunk}"


def _draw_picture(schedule: Schedule, timeline: Timeline, title: str, picture: Path) -> None:
    """Draws a row for each stage; widths are the estimated times.

    Forward passes are blue, backward passes green, later chunks darker.
    """
    # Not pyplot, which keeps a global figure and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    actions = max(len(slots) for slots in timeline.slots)
    figure = Figure(figsize=(min(4 + 0.3 * actions, 40), 1.6 + 0.45 * schedule.stages), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    shades = min(schedule.chunks, len(_COLOURS["forward"]))
    for stage, slots in enumerate(timeline.slots):
        for start, end, action in slots:
            shade = action.chunk * shades // schedule.chunks
            colour = _COLOURS[action.kind][shade]
            axis.barh(stage, end - start, left=start, height=0.9, color=colour, edgecolor="white", linewidth=0.6)
            ink = "black"
            if shade > 1:
                ink = "white"
            label = str(action.micro_batch)
            axis.text((start + end) / 2, stage, label, ha="center", va="center", fontsize=8, color=ink)
    axis.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axis.invert_yaxis()
    axis.set_xlim(0, timeline.end)
    axis.set_xticks([])
    key = "estimated time; numbers are micro-batches, blue forward, green backward passes"
    if schedule.chunks > 1:
        key += ", darker: later chunks"
    axis.set_xlabel(key)
    axis.set_title(title, fontsize=10)
    figure.savefig(picture, format="png", dpi=110)
