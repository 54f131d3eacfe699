"""Matrix products that gather a factor, or scatter their sum, part by part: asynchronous tensor parallelism.

    ranks 0 1 2 3, on rank 1    all_gather_matmul                   matmul_reduce_scatter
    own part first              x1 W; meanwhile x2 arrives          x2 W; is sent to rank 2 during the next product
                                x2 W; meanwhile x3 arrives          x3 W; is sent to rank 3
                                x3 W; meanwhile x0 arrives          x0 W; is sent to rank 0
                                x0 W                                x1 W, the own part; sum over the ranks

Where torch has symmetric memory, both are operators of ``torch.ops.symm_mem``: a rank's copy engines read the parts in
the memory of the other GPUs, on a stream of torch's own, for which the current stream waits before they return.
Elsewhere parts are sent and received in batches. Products, order and sum are the same in both forms.

Source: torch.distributed._symmetric_memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.comm.protocol import Call, Communicator, Message, Step, Work
from shoal.errors import CommError
from shoal.streams import is_in_host_memory


def symmetric_memory_error(axis: str, problem: str) -> CommError:
    return CommError(
        f"symmetric memory cannot be used on axis {axis!r}: {problem}.",
        do='set "tensor_parallel": {"tp_overlap_comm": true}, or make the axis shorter.',
        code="symmetric-memory",
    )


class PartsCommunicator(Communicator):
    """The ranks of another communicator, which multiply while they gather and scatter.

    Args:
        symmetric_on: the device on which ranks with NCCL use symmetric memory; None: all ranks send parts.

    Raises: CommError: torch cannot give the ranks symmetric memory.
    Communicates: to open symmetric memory; see ``NcclCommunicator``.
    """

    def __init__(self, comm: Communicator, symmetric_on: torch.device | None = None) -> None:
        super().__init__(comm.backend, comm.recorder)
        self._comm = comm
        self._is_open = symmetric_on is not None and comm.size > 1 and comm.backend.open_symmetric_memory(symmetric_on)

    def issue(self, call: Call) -> Work:
        return self._comm.issue(call)

    def staged(self, tensor: torch.Tensor, first: Callable[[], Work], *steps: Step) -> Work:
        return self._comm.staged(tensor, first, *steps)

    def all_gather_matmul(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], *, label: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``whole``: every rank's ``x`` along the sequence; and ``whole @ weight`` for each weight.

        Args:
            x: [..., L of a rank, K].
            weights: [K, M] each, in the dtype of ``x``.

        Returns: [..., L, K]; [..., L, M] each, contiguous.
        Communicates: as one all_gather of ``x``.
        Memory: symmetric memory of ``x``'s bytes, which all calls share.
        """
        shape, local = x.shape, x.reshape(-1, *x.shape[-2:]).contiguous()  # [B, L of a rank, K]
        products: list[torch.Tensor] = []

        def operator(group: str) -> torch.Tensor:
            gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(local, list(weights), 1, group)
            products.extend([gathered, *outputs])
            return products[0]

        if self._is_open and not is_in_host_memory(x):
            nbytes = x.nbytes * (self.size - 1)
            self.issue(Call("all_gather", label, x.expand(self.size, *shape), x, nbytes, operator=operator)).wait()
        else:
            products.extend(self._gather_in_batches(local, weights, label))
        whole, *outputs = (product.contiguous().view(*shape[:-2], -1, product.shape[-1]) for product in products)
        return whole, outputs

    def matmul_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor, *, label: str) -> torch.Tensor:
        """This rank's part, along the sequence, of the sum over the ranks of ``x @ weight``.

        The sum is in fp32 for 16-bit tensors, and rounded once.

        Args:
            x: [..., L, K]; the ranks divide L.
            weight: [K, M].

        Returns: [..., L of a rank, M].
        Communicates: as one reduce_scatter of the product.
        Memory: symmetric memory of twice the result's bytes, which all calls share; until the sum, the product's bytes.
        """
        by_sequence = x.reshape(-1, *x.shape[-2:])  # [B, L, K]

        def operator(group: str) -> torch.Tensor:
            out: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(by_sequence, weight, "sum", 1, group)
            return out

        if self._is_open and not is_in_host_memory(x):
            full = x[..., :1].expand(*x.shape[:-1], weight.shape[1])  # of the shape of the product
            own = full.narrow(-2, 0, full.shape[-2] // self.size)
            call = Call("reduce_scatter", label, own, full, own.nbytes * (self.size - 1), operator=operator)
            scattered = self.issue(call).wait()
        else:
            scattered = self._scatter_in_batches(by_sequence, weight, label)
        return scattered.view(*x.shape[:-2], *scattered.shape[1:])

    def _gather_in_batches(self, x: torch.Tensor, weights: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Shape: [B, L of a rank, K], [K, M] each -> [B, L, K], [B, L, M] each."""
        num_rows, length, width = x.shape
        sizes = [width, *(weight.shape[1] for weight in weights)]
        whole, *outputs = (x.new_empty(self.size, length, num_rows, size) for size in sizes)
        whole[self.rank].copy_(x.transpose(0, 1))
        works: list[Work] = []
        for step in range(1, self.size):
            reader, source = (self.rank - step) % self.size, (self.rank + step) % self.size
            send = Message("send", whole[self.rank].view(-1), reader, label)
            works.append(self.batch([send, Message("recv", whole[source].view(-1), source, label)]))
        for step in range(self.size):
            if step:
                works[step - 1].wait()
            source = (self.rank + step) % self.size
            for output, weight in zip(outputs, weights, strict=True):
                torch.mm(whole[source].view(-1, width), weight, out=output[source].view(-1, weight.shape[1]))
        for work in works:
            work.drain()
        return [each.flatten(0, 1).transpose(0, 1) for each in (whole, *outputs)]

    def _scatter_in_batches(self, x: torch.Tensor, weight: torch.Tensor, label: str) -> torch.Tensor:
        """Shape: [B, L, K], [K, M] -> [B, L of a rank, M]."""
        parts = x.transpose(0, 1).reshape(self.size, -1, x.shape[-1])  # [ranks, L of a rank x B, K]
        products, summands = (x.new_empty(self.size, parts.shape[1], weight.shape[1]) for _ in range(2))
        works: list[Work] = []
        for step in range(1, self.size):
            owner, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            torch.mm(parts[owner], weight, out=products[owner])
            send = Message("send", products[owner].view(-1), owner, label)
            works.append(self.batch([send, Message("recv", summands[source].view(-1), source, label)]))
        torch.mm(parts[self.rank], weight, out=summands[self.rank])
        for work in works:
            work.drain()
        by_rank = summands.view(self.size, -1, x.shape[0], weight.shape[1])  # [ranks, L of a rank, B, M]
        return by_rank.permute(2, 0, 1, 3).sum(1)
