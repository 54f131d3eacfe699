"""DeepSpeed's layer of experts: a gate, the experts that this rank holds, and a residual expert.

MoE
    deepspeed_moe                 MOELayer
        gate.wg                   nn.Linear, hidden_size -> num_experts; computed in fp32
        experts                   Experts
            deepspeed_experts     the local experts, copies of the expert that was given
    mlp, coefficient              with use_residual (PR-MoE, arXiv:2201.05596)
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shoal.comm.world import current_world
from shoal.errors import AssertedUsageError, UsageError
from shoal.mesh import Mesh
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.gate import jitter, top1gating, top2gating, topkgating
from shoal.parallel.expert.held import ExpertsHeld, ListedExperts

NOISE = (None, "None", "Jitter", "RSample")


class TopKGate(nn.Module):
    """The router: scores of the experts for each token, in fp32, and the routing by them.

    Args:
        model_dim: the width of a token.
        capacity_factor, eval_capacity_factor: of the capacity while training and while evaluating; see
            ``gate.capacity_of``.
        noisy_gate_policy: while training, ``Jitter`` multiplies the input by random numbers near 1; with ``k=1``,
            ``RSample`` adds Gumbel noise to the scores.
        use_rts: with ``k=1``, drop tokens at random.
        top2_2nd_expert_sampling: with ``k=2``, choose the second expert by scores with Gumbel noise.
        ep_group: of ``forward`` alone; see ``gate.dense``.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= num_experts:
            raise UsageError(
                f"a gate cannot send each token to {k!r} of {num_experts} experts.",
                do=f"give k a whole number from 1 to {num_experts}.",
                code="expert-gate",
            )
        sizes = {"capacity_factor": capacity_factor, "eval_capacity_factor": eval_capacity_factor}
        for name, size in {**sizes, "min_capacity": min_capacity}.items():
            if not isinstance(size, (int, float)) or not 0 <= size < math.inf:
                raise UsageError(
                    f"{name}={size!r} is not a number from 0.",
                    do=f"correct {name}; to drop no token, set drop_tokens=False.",
                    code="expert-gate",
                )
        if drop_tokens and not min_capacity and not min(sizes.values()):
            raise UsageError(
                "a capacity factor and min_capacity are 0, so that every token is dropped.",
                do="give capacity_factor and eval_capacity_factor, or min_capacity, a value above 0.",
                code="expert-gate",
            )
        if noisy_gate_policy not in NOISE:
            raise AssertedUsageError(
                f"noisy_gate_policy={noisy_gate_policy!r} is not known.",
                do="use 'Jitter', 'RSample' or None.",
                code="expert-gate",
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Any:
        """Route tokens.

        Args:
            input: Shape: [tokens, model_dim].
            used_token: with ``k=1`` (other gates ignore it, as DeepSpeed's do), 0 for tokens that go nowhere.
                Shape: [tokens].
            use_tutel: has no effect.

        Returns: with ``sparse_routes`` a GateResult; else what ``gate.dense`` returns.
        """
        if used_token is not None and self.k > 1:
            warnings.warn(f"used_token has no effect with k={self.k}, as in DeepSpeed.", stacklevel=2)
        tokens = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = jitter(tokens)
        logits = functional.linear(tokens, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        options = {"drop_tokens": self.drop_tokens, "ep_group": self.ep_group, "sparse_routes": sparse_routes}
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            return top1gating(logits, factor, self.min_capacity, used_token, noise, use_rts=self.use_rts, **options)
        if self.k == 2:
            is_sampled = self.top2_2nd_expert_sampling
            return top2gating(logits, factor, self.min_capacity, top2_2nd_expert_sampling=is_sampled, **options)
        return topkgating(logits, self.k, factor, self.min_capacity, **options)


class Experts(nn.Module):
    """Copies of one expert, each with parameters of its own.

    Each parameter has the attributes ``allreduce = False`` and ``group_name``, which scripts for DeepSpeed read.

    Args:
        num_local_experts: that this rank holds.
        expert_group_name: of the ranks that hold the others.
        held: which experts of the layer they are; None: all of them.
    """

    def __init__(
        self,
        expert: nn.Module,
        num_local_experts: int = 1,
        expert_group_name: str | None = None,
        held: ExpertsHeld | None = None,
    ) -> None:
        super().__init__()
        self.deepspeed_experts = ListedExperts([copy.deepcopy(expert) for _ in range(num_local_experts)])
        self.deepspeed_experts.experts_held = held or ExpertsHeld(num_local_experts, stack=None)
        self.num_local_experts = num_local_experts
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Each expert's output for its rows; see ``ListedExperts``.

        Args:
            inputs: rows in the order of the experts (shape: [rows, width]); without ``counts`` equal parts along dim 1.
            counts: rows of each expert.
        """
        dim = 0
        if counts is None:
            parts = inputs.split(-(-inputs.shape[1] // self.num_local_experts), dim=1)
            counts, dim = [part.shape[1] for part in parts], 1
        outputs: torch.Tensor = self.deepspeed_experts(inputs, counts, dim)
        return outputs


class MOELayer(nn.Module):
    """Sends tokens to the experts that a gate names, and adds up what comes back.

    After each forward ``l_aux`` is the auxiliary loss and ``exp_counts`` the tokens routed to each expert.

    Args:
        gate: a TopKGate.
        experts: an Experts.
        ep_group_name, ep_size, num_local_experts: attributes of those names.
        use_tutel: has no effect: tokens are always moved by index.
    """

    stays_whole = True  # a tensor-parallel plan need not name its layers: the router is whole, as experts may be

    def __init__(
        self,
        gate: nn.Module,
        experts: Experts,
        ep_group_name: str | None,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.l_aux: Any = None
        self.exp_counts: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the loss of the last forward, which cannot be copied: a copied model has not run yet."""
        return {**self.__dict__, "l_aux": None, "exp_counts": None}

    def forward(self, *input: Any, **kwargs: Any) -> torch.Tensor:
        """Args: the hidden states (shape: [..., width]) and ``used_token`` or None; see TopKGate.

        Communicates: as ``run_experts``.
        """
        hidden, used_token = input[0], input[1] if len(input) > 1 else None
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routing = self.gate(tokens, used_token, True)
        self.l_aux, self.exp_counts = routing.l_aux, routing.exp_counts
        held = self.experts.deepspeed_experts.experts_held
        capacity = routing.capacity
        may_drop = capacity is not None or used_token is not None
        given = (tokens, routing.expert_index, routing.weights, self.experts, held)
        out = run_experts(*given, may_drop=may_drop, capacity=capacity)
        return out.reshape(hidden.shape)


class MoE(nn.Module):
    """A layer of experts with the signature of ``deepspeed.moe.layer.MoE``.

    The engine finds the layer, divides its experts among the expert-parallel ranks and groups their parameters by
    itself. Every copy of the expert begins with the same values.

    Args:
        hidden_size: the width of a token, of input and output.
        expert: a module that takes and returns ``[rows, hidden_size]`` (of a tuple, the first is taken).
        num_experts: of all ranks together.
        ep_size: the ranks among which the experts are divided; it divides ``num_experts``.
        k: experts that a token goes to.
        capacity_factor, eval_capacity_factor, min_capacity: of an expert's capacity, counted for each rank's tokens.
        use_residual: each token goes to ``expert`` itself too; a linear layer weighs its output against the experts'.
        noisy_gate_policy: ``Jitter``, ``RSample`` or None; see TopKGate.
        drop_tokens: False: no token is dropped and nothing has a capacity.
        use_rts: see TopKGate.
        use_tutel: has no effect: tokens are always moved by index.
        enable_expert_tensor_parallelism: split each expert of the model over the tensor-parallel ranks, or as many of
            them as ``expert_tensor_parallel_size`` says, if that is above 1; see ``tensor``.
            Without it in any layer these ranks hold different experts, whole.
        top2_2nd_expert_sampling: see TopKGate.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        held = ExpertsHeld(num_experts, ep_size, stack=None)
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = held.num_local
        experts = Experts(expert, held.num_local, self.expert_group_name, held)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, held.num_local, use_tutel)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Divide the experts among runs of ``ep_size`` neighbouring ranks, for a layer without an engine.

        Args:
            use_data_before_expert_parallel_: has no effect: which ranks hold an expert changes no result.

        Communicates: the first time, control messages: every rank calls.
        """
        if self.ep_size > 1:
            world = current_world()
            comm = world.communicator("ep", Mesh.of(world.size, ep=self.ep_size))
            self.deepspeed_moe.experts.deepspeed_experts.experts_held.set_ranks(comm)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            hidden_states: Shape: [..., hidden_size].
            used_token: see TopKGate.

        Returns: the output, the auxiliary loss, and the tokens routed to each expert.
        Communicates: as ``run_experts``.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            residual = self.mlp(hidden_states)
            residual = residual[0] if isinstance(residual, tuple) else residual
            share = functional.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + residual * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
