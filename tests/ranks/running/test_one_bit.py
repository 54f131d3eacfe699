"""1-bit Adam, 0/1 Adam and 1-bit LAMB, against one process that does the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.formats import format_named
from shoal.comm.world import current_world
from tests.helpers.models import Plain
from tests.helpers.training import Trained, batch, config, finish, main_parameters, make, run_steps, start
from tests.ranks.running.test_wire_formats import encoded, layouts_of, through

STEPS = 9
LR, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.99), 1e-6
COMMON = {"lr": LR, "weight_decay": DECAY, "betas": list(BETAS), "eps": EPS}
ADAM = {"type": "OneBitAdam", "params": {**COMMON, "freeze_step": 3}}
# Gradients as they are in steps 1, 2 and 4; sums in steps 6, 7, 8 and 12.
ZERO_ONE = {
    "type": "ZeroOneAdam",
    "params": {
        **COMMON,
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 4,
    },
}
LAMB = {"type": "OneBitLamb", "params": {**COMMON, "freeze_step": 3}}
ALL = {"adam": ADAM, "zero one": ZERO_ONE, "lamb": LAMB}
TP_PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "head": "replicate", "unused": "replicate"}
LOCAL = (9, 10, 11)  # steps of it after which the ranks' parameters differ


def settings_of(name: str, **sections: Any) -> dict[str, Any]:
    return config(0, optimizer=ALL[name], **sections)


def train(settings: dict[str, Any], steps: int = STEPS) -> tuple[Trained, Any]:
    engine = start(Plain, settings, None)
    layouts = layouts_of(engine)
    return finish(engine, run_steps(engine, steps)), layouts


Values = dict[str, torch.Tensor]


class Emulation:
    """All ranks of a run in one process. State is by parameter group of the engine, flat.

    Args:
        layouts: of the parameter groups.
    """

    def __init__(self, layouts: Any, num_ranks: int, num_micro: int = 1) -> None:
        self.layouts, self.num_ranks, self.num_micro = layouts, num_ranks, num_micro
        self.main, self.model = make(Plain), make(Plain)
        self.form = format_named("1bit")
        self.errors = {(label, rank): torch.zeros(numel) for label, numel, _ in layouts for rank in range(num_ranks)}
        self.seconds = {label: torch.zeros(numel) for label, numel, _ in layouts}
        self.m, self.v = ({label: torch.zeros(numel) for label, numel, _ in layouts} for _ in range(2))
        self.used = {label: torch.zeros(numel) for label, numel, _ in layouts}
        self.w = {
            label: self.flat(dict(self.main.named_parameters()), numel, layout) for label, numel, layout in layouts
        }

    def flat(self, values: Values, numel: int, layout: Any) -> torch.Tensor:
        result = torch.zeros(numel)
        for name, offset, size in layout:
            if name in values:
                result[offset : offset + size] = values[name].detach().flatten()
        return result

    def gradients(self, step: int, weights: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """By rank and group: the gradients of a step, at the weights of each rank."""
        found = []
        for rank in range(self.num_ranks):
            named = dict(self.model.named_parameters())
            for label, _, layout in self.layouts:
                for name, offset, size in layout:
                    named[name].data.copy_(weights[rank][label][offset : offset + size].view_as(named[name]))
            self.model.zero_grad()
            for micro in range(self.num_micro):
                loss = self.model(*batch(step * self.num_micro + micro, rank, self.num_ranks)) / self.num_micro
                loss.backward()
            values = {name: p.grad for name, p in named.items() if p.grad is not None}
            found.append({label: self.flat(values, numel, layout) for label, numel, layout in self.layouts})
            for label, _, layout in self.layouts:
                for name, offset, size in layout:
                    self.used[label][offset : offset + size] = float(name in values)
        return found

    def used_ranges(self) -> list[tuple[str, int, int]]:
        """Parameters that lie next to each other, all with a gradient."""
        ranges: list[tuple[str, int, int]] = []
        for label, _, layout in self.layouts:
            last = -1
            for _, offset, size in layout:
                if not self.used[label][offset]:
                    last = -1
                elif last >= 0:
                    ranges[-1] = (label, last, offset + size)
                else:
                    last = offset
                    ranges.append((label, offset, offset + size))
        return ranges

    def plain_mean(self, values: list[torch.Tensor]) -> torch.Tensor:
        total = values[0].clone()
        for other in values[1:]:
            total.add_(other)
        return total.mul_(1 / self.num_ranks)

    def encoded_mean(self, label: str, values: list[torch.Tensor]) -> torch.Tensor:
        sent = [through(self.form, each, self.num_ranks, self.errors[label, r]) for r, each in enumerate(values)]
        return through(self.form, self.plain_mean(sent), self.num_ranks, self.seconds[label])

    def flat_of(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """The parameters in the order of the layouts, one after the other."""
        return torch.cat([values[label][at : at + size] for label, _, own in self.layouts for _, at, size in own])

    def whole(self) -> Values:
        return {
            name: self.w[label][offset : offset + size].view_as(dict(self.main.named_parameters())[name])
            for label, _, layout in self.layouts
            for name, offset, size in layout
        }


def denominator(v: torch.Tensor, count: int) -> torch.Tensor:
    return (v / (1 - BETAS[1] ** torch.tensor(float(count)).double())).sqrt().add_(EPS)


def rate(step: int) -> torch.Tensor:
    return LR / (1 - BETAS[0] ** torch.tensor(float(step)).double())


def emulated_adam(run: Emulation, freeze_step: int, steps: int) -> Values:
    """The warm-up is torch's AdamW on the ranges that an engine updates: its last bits depend on where one ends."""
    b1 = BETAS[0]
    warm: dict[tuple[str, int, int], torch.nn.Parameter] = {}
    for step in range(1, steps + 1):
        gradients = run.gradients(step - 1, [run.w] * run.num_ranks)
        if step == 1:
            warm = {key: torch.nn.Parameter(run.w[key[0]][key[1] : key[2]]) for key in run.used_ranges()}  # no copies
            adamw = torch.optim.AdamW(warm.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        means = {}
        for label in run.w:
            own = [each[label] for each in gradients]
            if step > freeze_step:
                m = torch.zeros_like(run.w[label])
                for (of, start, stop), parameter in warm.items():
                    if of == label:
                        m[start:stop] = adamw.state[parameter]["exp_avg"]
                means[label] = run.encoded_mean(label, [g.mul(1 - b1).add_(m, alpha=b1) for g in own])
            else:
                means[label] = run.plain_mean(own)
        for (label, start, stop), parameter in warm.items():
            parameter.grad = means[label][start:stop].clone()
            if step > freeze_step:
                m, v = (adamw.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))
                m.copy_(parameter.grad * (v > 0))
                change = (m / denominator(v, freeze_step)).mul_(rate(step))
                parameter.data.mul_(1 - LR * DECAY).sub_(change)
        if step <= freeze_step:
            adamw.step()
    return run.whole()


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_bit_adam_has_the_bits_of_one_process(num_ranks: int, num_micro: int, ranks: Callable[..., Any]) -> None:
    settings = settings_of("adam", gradient_accumulation_steps=num_micro)
    for steps in (3, STEPS):
        results = ranks(num_ranks, train, settings, steps)
        wanted = emulated_adam(Emulation(results[0][1], num_ranks, num_micro), 3, steps)
        for trained, _ in results:
            for name, value in trained.main_parameters.items():
                assert torch.equal(value, wanted[name]), (steps, name, float((value - wanted[name]).abs().max()))


def emulated_zero_one(run: Emulation, steps: int) -> Values:
    """With the schedule of ``ZERO_ONE`` written out."""
    b1, b2 = BETAS
    with_variance, with_sum = (1, 2, 4), (6, 7, 8, 12)
    kept = {label: w.clone() for label, w in run.w.items()}
    of_rank = [{label: w.clone() for label, w in run.w.items()} for _ in range(run.num_ranks)]
    own_m = [{label: torch.zeros_like(w) for label, w in run.w.items()} for _ in range(run.num_ranks)]
    u = [{label: torch.zeros_like(w) for label, w in run.w.items()} for _ in range(run.num_ranks)]
    rates, count = torch.zeros((), dtype=torch.float64), 0
    for step in range(1, steps + 1):
        gradients = run.gradients(step - 1, of_rank)
        count += step in with_variance
        if step == 6:  # other values are summed from here on
            for error in (*run.errors.values(), *run.seconds.values()):
                error.zero_()
        if step > 5:
            rates.mul_(1 - LR * DECAY).add_(rate(step))
        for label, w in run.w.items():
            own, v = [each[label] for each in gradients], run.v[label]
            if step <= 5:
                mean = run.plain_mean(own) if step in with_variance else run.encoded_mean(label, own)
                m = run.m[label].mul_(b1).add_(mean, alpha=1 - b1)
                if step in with_variance:
                    v.mul_(b2).addcmul_(mean, mean, value=1 - b2)
                m.mul_(v > 0)
                w.mul_(1 - LR * DECAY).sub_((m / denominator(v, count)).mul_(rate(step)))
                for rank in range(run.num_ranks):
                    own_m[rank][label].copy_(m)
            else:
                w.mul_(1 - LR * DECAY)
                for rank, g in enumerate(own):
                    m = own_m[rank][label].mul_(b1).add_(g, alpha=1 - b1).mul_(v > 0)
                    u[rank][label].mul_(1 - LR * DECAY).add_(m * rate(step))
                if step in with_sum:
                    mean = run.encoded_mean(label, [each[label] for each in u]) * (v > 0)
                    w.sub_(mean / denominator(v, count))
                    for rank in range(run.num_ranks):
                        own_m[rank][label].copy_(mean / rates)
                        u[rank][label].zero_()
            w.copy_(torch.where(run.used[label] > 0, w, kept[label]))
            for rank in range(run.num_ranks):
                local = w - u[rank][label] / denominator(v, count)
                of_rank[rank][label].copy_(torch.where(run.used[label] > 0, local, w))
        if step in with_sum:
            rates.zero_()
    return {**run.whole(), **{f"rank {rank}": run.flat_of(each) for rank, each in enumerate(of_rank)}}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zero_one_adam_has_the_bits_of_one_process(num_ranks: int, ranks: Callable[..., Any]) -> None:
    for steps in (5, 10, 12):
        results = ranks(num_ranks, train, settings_of("zero one"), steps)
        wanted = emulated_zero_one(Emulation(results[0][1], num_ranks), steps)
        for rank, (trained, layouts) in enumerate(results):
            for name, value in trained.main_parameters.items():
                assert torch.equal(value, wanted[name]), (steps, name, float((value - wanted[name]).abs().max()))
            own = torch.cat([trained.parameters[name].flatten() for _, _, layout in layouts for name, _, _ in layout])
            assert torch.equal(own, wanted[f"rank {rank}"]), (steps, rank)
        assert (steps in LOCAL) != torch.equal(wanted["rank 0"], wanted["rank 1"])


def emulated_lamb(run: Emulation, freeze_step: int, steps: int) -> Values:
    b1, b2 = BETAS
    fresh: dict[str, torch.Tensor] = {}
    at: dict[tuple[str, int, int], torch.Tensor] = {}  # of each parameter: c, the last factor, s
    for step in range(1, steps + 1):
        gradients = run.gradients(step - 1, [run.w] * run.num_ranks)
        used = [(label, a, a + size) for label, _, own in run.layouts for _, a, size in own if run.used[label][a]]
        at = at or {key: torch.tensor([0.0, 1.0, 1.0]) for key in used}
        if step == freeze_step + 1:
            fresh = {label: v.clone() for label, v in run.v.items()}
            sizes = {key: run.m[key[0]][key[1] : key[2]].square().mean().sqrt() for key in used}
            for key, size in sizes.items():
                at[key][2] = torch.stack(list(sizes.values())).mean() / size
        scales = {label: torch.ones_like(w) for label, w in run.w.items()}
        for label, a, z in used:
            scales[label][a:z] = at[label, a, z][2]
        means = {}
        for label, m in run.m.items():
            own = [each[label] for each in gradients]
            if step <= freeze_step:
                means[label] = run.plain_mean(own)
            else:
                means[label] = run.encoded_mean(label, [g.mul(1 - b1).add_(m, alpha=b1) * scales[label] for g in own])
        correction = (1 - b2 ** min(step, freeze_step)) ** 0.5 / (1 - b1**step)
        for label, a, z in used:
            m, v, w, mean, known = (x[label][a:z] for x in (run.m, run.v, run.w, means, {**run.m, **fresh}))
            if step <= freeze_step:
                m.mul_(b1).add_(mean, alpha=1 - b1)
                v.mul_(b2).addcmul_(mean, mean, value=1 - b2)
                u = m / (v.sqrt() + EPS) + DECAY * w
                ratio = (w.norm() / u.norm()).clamp(0.01, 10.0) if w.norm() > 0 and u.norm() > 0 else torch.tensor(1.0)
                if ratio != 1:
                    at[label, a, z][0] = 0.9 * at[label, a, z][0] + 0.1 * ratio
                w.sub_(LR * correction * ratio * u)
                continue
            new = mean / at[label, a, z][2] * (v > 0)
            meant = (new - b1 * m) / (1 - b1)
            known.mul_(b2).addcmul_(meant, meant, value=1 - b2)
            m.copy_(new)
            plain = m / (v.sqrt() + EPS)
            u = plain + DECAY * w
            factor = ((v.sqrt() + EPS) / (known.sqrt() + EPS)).max()
            part = min(1.0, float(plain.norm() / u.norm()))
            last = float(at[label, a, z][1])
            factor = min(max(float(factor) * part + 1 - part, 0.5), 4.0)
            at[label, a, z][1] = min(max(factor, 0.9 * last), 1.1 * last)
            w.sub_(LR * correction * at[label, a, z][0] * at[label, a, z][1] * u)
    return run.whole()


def test_one_bit_lamb_is_that_of_one_process(ranks: Callable[..., Any]) -> None:
    """Within rounding: norms are summed in another order, and an encoded sign may turn where a momentum is nearly 0."""
    results = ranks(2, train, settings_of("lamb"), 5)
    wanted = emulated_lamb(Emulation(results[0][1], 2), 3, 5)
    for trained, _ in results:
        for name, value in trained.main_parameters.items():
            assert torch.allclose(value, wanted[name], rtol=0, atol=2e-6), (name, (value - wanted[name]).abs().max())


# Checkpoints, overflow, clipping, bytes.


@pytest.mark.parametrize("at", [2, 5, 10])
@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_has_the_bits_of_the_one_that_went_on(
    name: str, at: int, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """In the warm-up, after it, and where ranks step apart."""

    def resume() -> tuple[Values, Values, bool]:
        engine = start(Plain, settings_of(name), None)
        run_steps(engine, at)
        engine.save_checkpoint(tmp_path)
        before = main_parameters(engine)
        assert all(torch.equal(p, before[n]) for n, p in engine.module.named_parameters())  # a save has settled all
        run_steps(engine, 4, first=at)
        on = main_parameters(engine)
        engine.destroy()
        engine = start(Plain, settings_of(name), None)
        engine.load_checkpoint(tmp_path)
        run_steps(engine, 4, first=at)
        continued = main_parameters(engine)
        has_errors = any(error.has_memory for g in engine.sharded.trained_groups for error in g.gradient.sent.errors)
        engine.destroy()
        return on, continued, has_errors

    for on, continued, has_errors in ranks(2, resume):
        assert has_errors
        assert all(torch.equal(value, continued[name]) for name, value in on.items())


@pytest.mark.parametrize("at", [4, 10])
@pytest.mark.parametrize("name", ALL)
def test_a_step_that_is_skipped_changes_neither_state_nor_errors(name: str, at: int, ranks: Callable[..., Any]) -> None:
    def state(engine: shoal.Engine) -> list[torch.Tensor]:
        groups = engine.sharded.trained_groups
        found = [value for group in groups for _, _, value in group.elementwise_state()]
        found += [error.stored_values for group in groups for error in group.gradient.sent.errors]
        return [value.clone() for value in (*found, *(p.detach() for p in engine.module.parameters()))]

    def skip() -> tuple[int, bool]:
        engine = start(Plain, settings_of(name, precision={"nonfinite": "skip"}), None)
        run_steps(engine, at)
        before, world = state(engine), current_world()
        # Of one rank alone, and in the last elements: a range that no other rank looks at.
        engine.backward(engine(*batch(at, world.rank, world.size)))
        if world.rank == 1:
            group = engine.sharded.trained_groups[0]
            group.gradient.memory()[group.buffer.layout.specs[0].offset] = torch.inf
        engine.step()
        return engine.skipped_steps, all(torch.equal(a, b) for a, b in zip(before, state(engine), strict=True))

    assert ranks(2, skip) == [(1, True)] * 2


def test_own_gradients_are_clipped_by_the_mean_square_of_the_ranks_norms(ranks: Callable[..., Any]) -> None:
    """Half of the limit is half of the gradient's part in the momentum."""

    def norm() -> tuple[float, float]:
        engine = start(Plain, settings_of("adam"), None)
        run_steps(engine, 3)
        world = current_world()
        engine.backward(engine(*batch(3, world.rank, world.size)))
        squares = sum(float(g.gradient.memory().double().square().sum()) for g in engine.sharded.trained_groups)
        engine.step()
        found = float(engine.get_global_grad_norm() or 0.0)
        engine.destroy()
        return squares, found

    results = ranks(2, norm)
    assert abs(results[0][1] - (sum(square for square, _ in results) / 2) ** 0.5) < 1e-5
    limit = results[0][1] / 2
    clipped = ranks(2, train, settings_of("adam", gradient_clipping=limit), 4)
    plain = ranks(2, train, settings_of("adam"), 4)
    moved = [{**r[0].main_parameters} for r in (clipped[0], plain[0])]
    assert not all(torch.equal(value, moved[1][name]) for name, value in moved[0].items())


def step_bytes(settings: dict[str, Any], steps: int) -> tuple[list[int], Any]:
    """Bytes of parameters and gradients that a rank receives in each step."""
    engine = start(Plain, settings, None)
    layouts, found = layouts_of(engine), []
    for step in range(steps):
        with current_world().recorder.recording() as entries:
            run_steps(engine, 1, first=step)
        found.append(sum(entry.nbytes for entry in entries if entry.kind == "data"))
    engine.destroy()
    return found, layouts


def test_steps_receive_the_bytes_of_the_formula(ranks: Callable[..., Any]) -> None:
    """Of two ranks, each receives one shard, in both halves of an all-reduce."""
    (adam, layouts), (zero_one, _) = (ranks(2, step_bytes, settings_of(name), 12)[0] for name in ("adam", "zero one"))
    plain = sum(2 * 4 * numel // 2 for _, numel, _ in layouts)
    one_bit = sum(2 * encoded("1bit", numel // 2) for _, numel, _ in layouts)
    assert adam == [plain] * 3 + [one_bit] * 9
    schedule = {1: plain, 2: plain, 3: one_bit, 4: plain, 5: one_bit, 6: one_bit, 7: one_bit, 8: one_bit, 12: one_bit}
    assert zero_one == [schedule.get(step, 0) for step in range(1, 13)]


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("adam", {"zero_optimization": {"stage": 2}}, "stage: 2, but OneBitAdam sums momenta"),
        ("zero one", {"wire": {"reduce": "int8"}}, 'wire.reduce: "int8", but ZeroOneAdam decides'),
        ("lamb", {"local_steps": {"every": 4}}, "local_steps.every: 4, but OneBitLamb decides"),
        ("adam", {"precision": {"state_dtype": "bf16"}}, "keeps its state in the format of fp32 main parameters"),
        (
            "adam",
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            "those of .* are summed in bfloat16",
        ),
        (
            "lamb",
            {"parallel": {"tp": 2, "tp_plan": TP_PLAN}},
            "norms of whole",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_summed_is_refused(
    name: str, sections: dict[str, Any], said: str, ranks: Callable[..., Any]
) -> None:
    with pytest.raises(shoal.ShoalError, match=said) as caught:
        ranks(2, train, settings_of(name, **sections), 1)
    assert caught.value.code == "optimizer-sums"


def test_weights_that_are_taken_between_two_sums_are_those_of_the_last_sum(ranks: Callable[..., Any]) -> None:
    def take(is_taken: bool) -> tuple[Values, Values]:
        engine = start(Plain, settings_of("zero one"), None)
        run_steps(engine, 10)
        taken = engine.module_state_dict() if is_taken else {}
        run_steps(engine, 2, first=10)
        values = main_parameters(engine)
        engine.destroy()
        return taken, values

    results, others = ranks(2, take, True), ranks(2, take, False)
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name])
    assert all(torch.equal(value, others[0][1][name]) for name, value in results[0][1].items())  # nothing has changed


def test_a_run_ends_within_one_percent_of_adamws_loss(ranks: Callable[..., Any]) -> None:
    """Ten times the same 16 batches; the variance stays from the fifth time on."""

    def last_loss(optimizer: str, **params: Any) -> float:
        params = {"lr": 3e-3, "betas": [0.9, 0.99], **params}
        engine = start(Plain, config(0, optimizer={"type": optimizer, "params": params}), None)
        losses = [run_steps(engine, 1, first=step % 16)[0] for step in range(160)]
        engine.destroy()
        return sum(losses[-16:])

    adamw = sum(ranks(2, last_loss, "AdamW"))
    one_bit = sum(ranks(2, lambda: last_loss("OneBitAdam", freeze_step=64)))
    assert adamw < one_bit < 1.01 * adamw
