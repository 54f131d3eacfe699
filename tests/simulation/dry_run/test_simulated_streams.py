"""The simulated accelerator: which accesses are ordered, which are not, and what cannot be checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal
from shoal import streams
from shoal.device import Device, host_empty, read_vector
from shoal.errors import StreamError, UsageError
from shoal.memory.stream_copies import ComputeStream, StreamCopies, mark
from shoal.simulation.accelerator import SimulatedAccelerator
from shoal.simulation.accesses import bytes_of
from shoal.simulation.check import StreamCheck
from shoal.streams import HostThread, host_memory, resize_storage

CPU = torch.device("cpu")


@contextmanager
def checking() -> Iterator[tuple[SimulatedAccelerator, StreamCheck]]:
    with shoal.check_streams(raises=False) as check:
        found = streams.simulation()
        assert isinstance(found, SimulatedAccelerator)
        yield found, check


def faults(use: Callable[[SimulatedAccelerator], object]) -> list[str]:
    with checking() as (accelerator, check):
        use(accelerator)
    return [str(finding) for finding in check.findings]


def test_what_another_stream_writes_must_be_waited_for() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        tensor, side = torch.zeros(4), accelerator.stream()
        side.wait_stream(accelerator.current())
        with side:
            tensor.add_(1)
        if waits:
            accelerator.current().wait_stream(side)
        kept.append(tensor * 2)
        accelerator.current().wait_stream(side)

    kept: list[torch.Tensor] = []
    waits = True
    assert faults(use) == []
    waits = False
    (found,) = faults(use)
    assert "bytes 0 to 16 (16 B): aten.mul.Tensor on the compute stream reads it before aten.add_" in found
    assert "test_simulated_streams.py" in found
    assert "missing: the compute stream must wait for copy stream 0, before the second operation." in found


def test_streams_may_read_the_same_bytes_and_write_others() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        tensor, side = torch.zeros(8), accelerator.stream()
        side.wait_stream(accelerator.current())
        with side:
            tensor[:4].add_(1)
            tensor[6:].sum()
        tensor[4:].sum()
        tensor[4:6].add_(1)
        accelerator.current().wait_stream(side)

    assert faults(use) == []


def test_the_bytes_of_a_tensor_are_those_of_its_elements() -> None:
    whole = torch.zeros(4, 6)
    assert bytes_of(whole[1]) == (24, 48)
    assert bytes_of(whole[:, 1]) == (4, 80)  # with the gaps between
    assert bytes_of(whole[:0]) == (0, 0)
    assert bytes_of(torch.zeros(()).expand(3, 3)) == (0, 4)


def test_memory_is_not_used_by_another_stream_before_the_work_that_was_queued_when_it_was_allocated() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        tensor, side = torch.empty(4), accelerator.stream()
        with side:
            tensor.fill_(1)
        accelerator.current().wait_stream(side)

    (found,) = faults(use)
    assert "aten.empty.memory_format on the compute stream" in found


@pytest.mark.parametrize("kept_by", ["nothing", "a wait", "record_stream"])
@pytest.mark.parametrize("freed_by", ["the last reference", "resize"])
def test_memory_that_another_stream_uses_is_not_used_again_before_a_wait(kept_by: str, freed_by: str) -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        tensor, side = torch.zeros(4), accelerator.stream()
        side.wait_stream(accelerator.current())
        with side:
            tensor.sum()
        if kept_by == "a wait":
            accelerator.current().wait_stream(side)
        elif kept_by == "record_stream":
            accelerator.record_stream(tensor, side)
        if freed_by == "resize":
            resize_storage(tensor.untyped_storage(), 0)
        del tensor
        if is_reused:
            torch.empty(1)
        accelerator.current().wait_stream(side)
        torch.empty(1)

    is_reused = False  # before the wait
    assert faults(use) == []
    is_reused = True
    found = faults(use)
    assert len(found) == (kept_by == "nothing")
    if found:
        assert "the memory was freed" in found[0] and "or record_stream" in found[0]


def test_an_event_orders_what_came_before_it_and_nothing_later() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        first, second, side = torch.zeros(4), torch.zeros(4), accelerator.stream()
        side.wait_stream(accelerator.current())
        event = accelerator.event()
        with side:
            first.add_(1)
            event.record(side)
            second.add_(1)
        accelerator.current().wait_event(event)
        kept.append(first + 0)
        kept.append(second * 1)
        accelerator.current().wait_stream(side)

    kept: list[torch.Tensor] = []
    (found,) = faults(use)
    assert "aten.mul.Tensor" in found


def test_the_host_waits_by_reading_values_by_events_and_by_copies_that_block() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        copies, tensor = StreamCopies(CPU), torch.ones(4)
        pinned, pageable = host_empty(4, torch.float32, CPU), host_empty(4, torch.float32, CPU, is_pinned=False)
        done = copies.copy(tensor, pinned)
        if waits == "event":
            done.block()
        elif waits == "device":
            Device(CPU).synchronize()
        elif waits == "values":
            done.wait()
            read_vector(tensor.sum(0, keepdim=True), when_fake=0)
        elif waits == "item":
            done.wait()
            tensor.sum().item()
        pageable.copy_(pinned)
        accelerator.synchronize()
        pageable.copy_(tensor)  # blocks
        pageable.add_(1)

    for waits in ("event", "device", "values", "item"):
        assert faults(use) == [], waits
    waits = ""
    (found,) = faults(use)
    assert "aten.copy_.default on the host reads it before aten.copy_.default on copy stream 0 writes it" in found


@pytest.mark.parametrize(
    ("needs", "use_values"),
    [
        (False, lambda tensor: tensor[torch.tensor([1, 0])]),
        (True, lambda tensor: tensor[tensor > 0]),
        (False, lambda tensor: tensor.index_put_((torch.tensor([1]),), torch.ones(1))),
        (True, lambda tensor: tensor.index_put_((tensor > 0,), torch.ones(1))),
        (False, lambda tensor: tensor.repeat_interleave(torch.ones(4, dtype=torch.int64), output_size=4)),
        (True, lambda tensor: tensor.repeat_interleave(torch.ones(4, dtype=torch.int64))),
        (True, lambda tensor: tensor.nonzero()),
    ],
)
def test_the_host_waits_for_values_that_a_shape_depends_on_and_for_no_others(
    needs: bool, use_values: Callable[[torch.Tensor], object]
) -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        memory, tensor = host_empty(4, torch.float32, CPU), torch.ones(4)
        memory.copy_(tensor, non_blocking=True)
        kept.append(use_values(tensor))
        memory.add_(1)

    kept: list[object] = []
    assert len(faults(use)) == (0 if needs else 1)


def test_a_thread_starts_after_what_its_maker_has_done_and_is_waited_for_by_its_result() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        memory, thread = host_memory(torch.zeros(4), is_pinned=True), HostThread("adder")
        memory.add_(1)
        found = thread.submit(lambda: memory.add_(1))
        (found if waits else found._future).result()
        memory.add_(1)
        thread.close()

    waits = True
    assert faults(use) == []
    waits = False
    (found,) = faults(use)
    assert "the host must wait for the host's thread adder_0" in found


def test_without_values_what_a_thread_would_do_is_done_at_once() -> None:
    """A mode of fake tensors is one thread's: two that use it at a time are an error of torch's."""
    thread = HostThread("other")
    with FakeTensorMode():
        assert thread.submit(threading.get_ident).result() == threading.get_ident()
        failed = thread.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert thread.submit(threading.get_ident).result() != threading.get_ident()
    thread.close()


@pytest.mark.parametrize("maker", ["tensor", "zeros"])
def test_a_scalar_that_only_the_host_uses_does_not_make_the_host_wait_for_the_device(maker: str) -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        memory, step = host_empty(4, torch.float32, CPU), made()
        memory.copy_(torch.ones(4), non_blocking=True)
        step += 1
        step.item()
        memory.add_(1)

    made = {"tensor": lambda: torch.tensor(0.0), "zeros": lambda: torch.zeros(())}[maker]
    (found,) = faults(use)
    assert "aten.add_.Tensor on the host writes it before aten.copy_.default on the compute stream writes it" in found


def test_backward_runs_on_the_streams_of_its_forward() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        compute, side, other = accelerator.current(), accelerator.stream(), accelerator.stream()
        mine, beside = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        for parameter in (mine, beside):
            parameter.register_post_accumulate_grad_hook(lambda _: ran_on.append(accelerator.current()))
        side.wait_stream(compute)
        with side:
            product = beside * 2
        compute.wait_stream(side)
        product.register_hook(lambda _: ran_on.append(accelerator.current()))
        loss = (mine * 3 * product).sum()
        other.wait_stream(compute)
        with other:
            loss.backward()
            assert accelerator.current() is other
            assert mine.grad is not None and beside.grad is not None
            (mine.grad + beside.grad).mul_(2)  # the caller's stream has waited for those of the leaves
        names.extend(sorted(map(str, ran_on)))

    ran_on: list[object] = []
    names: list[str] = []
    assert faults(use) == []
    assert names == ["copy stream 0", "copy stream 0", "the compute stream"]


def test_what_a_hook_of_a_leaf_queues_is_not_waited_for() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        compute, side, memory = accelerator.current(), accelerator.stream(), torch.zeros(4)
        first, second = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)

        def add(_: torch.Tensor) -> None:
            memory.add_(1)

        for parameter in (first, second):
            parameter.register_post_accumulate_grad_hook(add)
        side.wait_stream(compute)
        with side:
            beside = first * 2
        compute.wait_stream(side)
        (beside + second * 3).sum().backward()

    assert any("aten.add_" in found for found in faults(use))


def test_a_stream_of_the_scripts_own_is_followed() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        compute, tensor = ComputeStream(CPU), torch.zeros(4)
        with accelerator.stream() as other:
            compute.follow(lambda: [tensor])
            tensor.add_(1)
            done = mark(CPU)
        assert other is not accelerator.current()
        done.wait()
        tensor.add_(1)

    assert faults(use) == []


def test_an_operator_whose_schema_hides_what_it_writes_is_named() -> None:
    library = torch.library.Library("stream_check", "DEF")
    library.define("silent(Tensor x) -> ()")
    library.define("lying(Tensor x) -> Tensor")
    library.define("honest(Tensor(a!) x) -> ()")
    library.impl("silent", lambda x: None, "CPU")
    library.impl("lying", lambda x: x.add_(1).clone(), "CPU")
    library.impl("honest", lambda x: x.add_(1) and None if x.numel() == 1 else None, "CPU")

    def use(accelerator: SimulatedAccelerator) -> None:
        operators, tensor = torch.ops.stream_check, torch.zeros(4)
        operators.silent(tensor)
        operators.lying(tensor)
        operators.honest(tensor)

    found = faults(use)
    assert len(found) == 2
    assert "stream_check.silent.default cannot be checked: its schema has no result and no argument" in found[0]
    assert "stream_check.lying.default cannot be checked: it changes an argument that its schema" in found[1]
    assert "test_simulated_streams.py" in found[0]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_memory_that_is_not_the_accelerators_is_named() -> None:
    with FakeTensorMode():
        foreign = torch.empty(2, device="cuda")

    def use(accelerator: SimulatedAccelerator) -> None:
        accelerator.operator(torch.ops.aten.sin.default, (foreign,), {}, None)
        torch.eye(2).to_sparse_csr()

    found = faults(use)
    assert any("a tensor is on cuda:0, and the simulated accelerator is the CPU" in each for each in found)
    assert any("the memory of a tensor with layout torch.sparse_csr is not known" in each for each in found)


def test_sparse_gradients_are_read_where_their_values_lie() -> None:
    def use(accelerator: SimulatedAccelerator) -> None:
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()

    assert faults(use) == []


def test_a_fault_is_an_error_at_the_end_of_the_block_and_no_fault_is_none() -> None:
    with shoal.check_streams() as check:
        torch.zeros(2).add_(1)
    assert check.num_operations == 2
    assert check.report() == "2 operations, 0 faults."
    with pytest.raises(StreamError, match="streams do not wait for each other") as raised:
        write_on_another_stream()
    assert raised.value.code == "stream-race"
    assert streams.simulation() is None


def write_on_another_stream(then: Exception | None = None) -> None:
    with shoal.check_streams():
        accelerator, tensor = streams.simulation(), torch.zeros(2)
        assert accelerator is not None
        with accelerator.stream():
            tensor.add_(1)
        if then is not None:
            raise then


def test_an_exception_in_the_block_is_not_hidden_by_a_fault() -> None:
    with pytest.raises(ValueError, match="mine"):
        write_on_another_stream(then=ValueError("mine"))


def test_blocks_are_not_nested() -> None:
    with shoal.check_streams(), pytest.raises(UsageError) as raised, shoal.check_streams():
        pass
    assert raised.value.code == "stream-check"
