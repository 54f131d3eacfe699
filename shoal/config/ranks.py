"""From the config and the number of ranks to the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from shoal.config.problems import Problem
from shoal.config.schema import Schema
from shoal.errors import ConfigError
from shoal.mesh import ORDER, Mesh, divisors_text, expert_ranks_text, order_problem

HPZ = "zero_optimization.zero_hpz_partition_size"
MODEL_AXES = ("pp", "cp", "sp", "tp")  # along which ranks see the same samples


def _asked(config: Schema) -> dict[str, dict[str, int]]:
    """By axis, the keys that give its degree."""
    axes = (*MODEL_AXES, "dp_replicate", "dp_shard", "ep")
    keys: dict[str, dict[str, int | str | None]] = {
        axis: {f"parallel.{axis}": getattr(config.parallel, axis)} for axis in axes
    }
    keys["pp"]["pipeline.stages"] = config.pipeline.stages
    keys["tp"]["tensor_parallel.autotp_size"] = config.tensor_parallel.autotp_size or None
    keys["tp"]["tensor_parallel.tp.tp_size"] = config.tensor_parallel.tp.tp_size
    if config.expert_parallel.enabled:
        keys["ep"]["expert_parallel.autoep_size"] = config.expert_parallel.autoep_size
    keys["sp"]["sequence_parallel_size"] = config.sequence_parallel_size
    for axis in (*MODEL_AXES, "ep"):  # 1 asks for nothing
        if axis == "pp" and len({*keys[axis].values()} - {"auto"}) > 1:
            continue
        keys[axis] = {path: degree for path, degree in keys[axis].items() if degree != 1}
    return {axis: {path: d for path, d in of.items() if isinstance(d, int)} for axis, of in keys.items()}


def model_degrees(config: Schema) -> dict[str, int]:
    """The degree of each axis along which ranks see the same samples, where it is above 1."""
    asked = _asked(config)
    return {axis: max(asked[axis].values()) for axis in MODEL_AXES if asked[axis]}


def model_size(config: Schema) -> int:
    """Ranks that see the same samples."""
    return prod(model_degrees(config).values())


def batch_ranks(config: Schema, num_ranks: int) -> tuple[int, str | None]:
    """The ranks by which batch sizes are multiplied, and how that number came about.

    Those that see other samples; with ``tensor_parallel.autotp_size`` all ranks, as DeepSpeed counts.
    """
    degrees = model_degrees(config)
    if config.tensor_parallel.autotp_size > 1:
        del degrees["tp"]
    return num_ranks // prod(degrees.values()), f"{num_ranks} ranks / ({_product(degrees)})" if degrees else None


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def rank_problems(config: Schema, num_ranks: int) -> Iterator[Problem]:
    """Degrees that do not fit the number of ranks, or each other."""
    for axis, keys in _asked(config).items():
        if len(set(keys.values())) > 1:
            what = f"the keys ask for different degrees of {axis}: {', '.join(f'{p} {n}' for p, n in keys.items())}."
            yield Problem(next(iter(keys)), what, "set one of them.", code="mesh")
    degrees, size = model_degrees(config), model_size(config)
    if num_ranks % size:
        path = next(iter(_asked(config)[next(iter(degrees))]))
        lower = num_ranks // size * size
        nearest = f"{lower} or {lower + size}" if lower else f"{size}"
        what = f"{num_ranks} ranks do not divide by {_product(degrees)} = {size}."
        yield Problem(path, what, f"start {nearest} ranks.", code="mesh")
        return
    dp = num_ranks // size
    if config.data_parallel_size not in (None, dp):
        over = f" / ({_product(degrees)})" if degrees else ""
        what = f"{config.data_parallel_size}, but {num_ranks} ranks{over} = {dp}."
        yield Problem("data_parallel_size", what, f"write {dp}, or leave it out.", code="mesh")
    problems = list(_shard_problems(config, dp))
    yield from problems
    order = config.parallel.order
    problem = None if order == "auto" or problems else order_problem(order, _degrees(config, dp))
    if problem is not None:
        yield Problem("parallel.order", *problem, code="mesh-order")


def _shard_keys(config: Schema) -> dict[str, int]:
    """The keys that give the ranks of a shard group, or the number of groups."""
    mics, asked = config.zero_optimization.mics_shard_size, config.parallel
    keys = {
        "zero_optimization.mics_shard_size": mics if mics > 0 else "auto",
        "parallel.dp_shard": asked.dp_shard,
        "parallel.dp_replicate": asked.dp_replicate if asked.dp_replicate != 1 else "auto",
    }
    return {path: size for path, size in keys.items() if isinstance(size, int)}


def _shard_problems(config: Schema, dp: int) -> Iterator[Problem]:
    hpz = config.zero_optimization.zero_hpz_partition_size or 1
    degrees = model_degrees(config)
    fsdp = dp * degrees.get("cp", 1) * degrees.get("sp", 1)
    groups: dict[str, int] = {}  # the ranks of a shard group, by the key that asks for it
    for path, size in {**_shard_keys(config), HPZ: hpz}.items():
        number, which = (fsdp, "ranks that shard parameters") if path == HPZ else (dp, "data-parallel ranks")
        if number % size:
            what = f"{size} does not divide {number} {which}."
            yield Problem(path, what, f"write one of {_divisors(number)}.", code="mesh")
        elif path != HPZ:
            groups[path] = dp // size if path.endswith("dp_replicate") else size
    local = config.local_steps.every
    is_left_open = not groups and config.parallel.dp_replicate != 1 and dp > 1
    if local is not None and config.zero_optimization.stage and is_left_open:
        what = f"{local}, and no key says which of the {dp} data-parallel ranks are one replica."
        do = "write the number of replicas to parallel.dp_replicate, or the ranks of one to parallel.dp_shard."
        yield Problem("local_steps.every", what, do, code="local-steps")
    if len(set(groups.values())) > 1:
        what = f"the keys ask for different shard groups: {', '.join(f'{p} for {n} ranks' for p, n in groups.items())}."
        yield Problem(next(iter(groups)), what, "set one of them.", code="mesh")
    if groups and hpz > 1:
        what = f"{hpz}, a second sharding, and {next(iter(groups))} asks for a shard group."
        yield Problem(HPZ, what, "set one of them.", code="mesh")
    ep = max(_asked(config)["ep"].values(), default=1)
    split, tp = config.expert_parallel.expert_tensor_parallel_size, degrees.get("tp", 1)
    if tp % split:
        what = f"{split} does not divide the {tp} tensor-parallel ranks, over groups of which an expert is split."
        if tp == 1:
            what = f"{split}, and there is 1 tensor-parallel rank."
        do = f"write {divisors_text(tp)}."
        yield Problem("expert_parallel.expert_tensor_parallel_size", what, do, code="mesh")
        return
    holders, product = fsdp * tp // split, expert_ranks_text(tp, split)
    if not groups and holders % ep:
        what = f"{ep} does not divide the {holders} ranks among which experts are divided ({product})."
        if holders == 1:
            what = f"{ep}, and there is 1 rank among which experts are divided ({product})."
        do = (
            f"write one of {_divisors(holders)}."
            if holders > 1
            else f"write 1, or start {ep} ranks for each pipeline stage."
        )
        yield Problem(next(iter(_asked(config)["ep"])), what, do, code="mesh")


def mesh_of(config: Schema, num_ranks: int) -> Mesh:
    """The mesh that a config means for a number of ranks. At stage 0 nothing is sharded: one shard group has all ranks,
    or, where replicas take steps of their own, each rank is one unless the keys name groups.

    Raises: ConfigError: the degrees do not fit the ranks, or each other.
    """
    for problem in rank_problems(config, num_ranks):
        raise ConfigError(f"{problem.path} = {problem.what}", do=problem.do, code="mesh")
    degrees = _degrees(config, num_ranks // model_size(config))
    order = ORDER if config.parallel.order == "auto" else config.parallel.order
    return Mesh.of(num_ranks, etp=config.expert_parallel.expert_tensor_parallel_size, order=order, **degrees)


def _degrees(config: Schema, dp: int) -> dict[str, int]:
    """The degree of each axis, of so many data-parallel ranks."""
    groups = [dp // size if path.endswith("dp_replicate") else size for path, size in _shard_keys(config).items()]
    is_local, stage = config.local_steps.every is not None, config.zero_optimization.stage
    dp_shard = groups[0] if groups and (stage or is_local) else 1 if is_local and not stage else dp
    ep = max(_asked(config)["ep"].values(), default=1)
    return {"dp_replicate": dp // dp_shard, "dp_shard": dp_shard, "ep": ep, **model_degrees(config)}
