"""DDPX in the place of DistributedDataParallel: arguments, errors, attributes, copies, uneven inputs."""

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import DDPX

OURS = {"mode", "algorithm", "transport", "link", "timeout_s", "check_replicas_every", "nonfinite", "local_steps"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.b(self.a(x)) if both else self.a(x)


def net(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_gradients(build: Any, world_size: int, step: int = 0, **kwargs: Any) -> list[Tensor | None]:
    rows = []
    for rank in range(world_size):
        module = build()
        module(data(rank, step), **kwargs).pow(2).sum().backward()
        rows.append([param.grad for param in module.parameters()])
    return [None if grads[0] is None else sum(grads) / world_size for grads in zip(*rows, strict=True)]


def check(wrapper: nn.Module, wanted: list[Tensor | None]) -> None:
    for param, mean in zip(wrapper.parameters(), wanted, strict=True):
        if mean is None:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad, mean)


# ---- The signature ---------------------------------------------------------------------------------------------------


def test_positional_arguments_are_ddps_in_its_order() -> None:
    theirs = list(inspect.signature(DistributedDataParallel).parameters.values())
    ours = list(inspect.signature(DDPX).parameters.values())
    shared = [parameter for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert [parameter.name for parameter in shared] == [parameter.name for parameter in theirs]
    assert {parameter.name for parameter in ours if parameter.kind is parameter.KEYWORD_ONLY} == OURS
    changed = {ours.name for ours, their in zip(shared, theirs, strict=True) if ours.default != their.default}
    assert changed == {"gradient_as_bucket_view"}  # on by default here: gradients lie in the buckets


def test_public_methods_and_attributes_are_there() -> None:
    wrapper = DDPX(net())
    names = {name for name in vars(DistributedDataParallel) if not name.startswith("_")} | set(
        "module device device_type device_ids output_device dim process_group is_multi_device_module reducer logger "
        "require_backward_grad_sync require_forward_param_sync find_unused_parameters gradient_as_bucket_view "
        "batched_grad_copy static_graph mixed_precision parameters_to_ignore modules_buffers named_module_buffers "
        "broadcast_bucket_size bucket_bytes_cap bucket_bytes_cap_default bucket_bytes_cap_list forward_sync_buffers "
        "skip_all_reduce_unused_params use_side_stream_for_tensor_copies _set_static_graph _get_ddp_logging_data "
        "_set_ddp_runtime_logging_sample_rate _register_builtin_comm_hook _register_fused_optim "
        "_register_buffer_comm_hook _set_params_and_buffers_to_ignore_for_model _check_reducer_finalized "
        "_remove_autograd_hooks _update_process_group _set_ddp_sink_clone _get_data_parallel_params".split()
    )
    assert [name for name in sorted(names) if not hasattr(wrapper, name)] == []


def test_it_is_an_instance_of_ddp_for_frameworks_that_unwrap() -> None:
    wrapper = DDPX(net())
    assert isinstance(wrapper, DistributedDataParallel)
    assert issubclass(DDPX, DistributedDataParallel)
    assert not isinstance(net(), DistributedDataParallel)


def test_it_trains_alone_without_torch_distributed() -> None:
    wrapper = DDPX(net())
    wrapper(data(0)).pow(2).sum().backward()
    check(wrapper, mean_gradients(net, 1))
    with wrapper.join():
        wrapper(data(0)).sum().backward()


# ---- Errors ----------------------------------------------------------------------------------------------------------


NOT_NEEDED = "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."


def on_two_devices() -> nn.Module:
    module = net()
    module.b = nn.Linear(4, 2, device="meta")
    return module


@pytest.mark.parametrize(
    ("build", "options", "kind", "words"),
    [
        (lambda: net().requires_grad_(False), {}, RuntimeError, NOT_NEEDED),
        (lambda: nn.Tanh(), {}, RuntimeError, NOT_NEEDED),
        (net, {"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element."),
        (net, {"device_ids": [0]}, ValueError, "DistributedDataParallel device_ids and output_device arguments only"),
        (net, {"output_device": 0}, ValueError, "DistributedDataParallel device_ids and output_device arguments only"),
        (on_two_devices, {}, ValueError, "DistributedDataParallel's input module must be on the same type of devices"),
        (lambda: nn.LazyLinear(3), {}, RuntimeError, "Modules with uninitialized parameters can't be used with"),
        (
            net,
            {"delay_all_reduce_named_params": []},
            ValueError,
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
        ),
        (lambda: nn.SyncBatchNorm(4), {}, ValueError, "SyncBatchNorm layers only work with GPU modules"),
        (net, {"process_group": 1, "device_mesh": 2}, RuntimeError, "Cannot specify both process_group and device_"),
        (net, {"mode": "fast"}, ValueError, "mode is one of naive, bucketed, overlapped, not 'fast'"),
        (net, {"algorithm": "rign"}, ValueError, "unknown algorithm 'rign'"),
        (net, {"transport": "smoke"}, ValueError, "unknown transport 'smoke'"),
        (net, {"nonfinite": "maybe"}, ValueError, "nonfinite is one of ignore, warn, error"),
        (net, {"check_replicas_every": -1}, ValueError, "check_replicas_every counts"),
        (net, {"bucket_cap_mb_list": [1, 0]}, ValueError, "bucket_cap_mb_list has sizes in MiB above zero"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_be_wrapped_is_refused_in_ddps_words(build, options, kind, words) -> None:
    with pytest.raises(kind) as failure:
        DDPX(build(), **options)
    assert str(failure.value).startswith(words)


def test_an_empty_list_of_devices_is_accepted() -> None:
    DDPX(net(), device_ids=[])


def test_deprecated_arguments_warn_and_work() -> None:
    with pytest.warns(FutureWarning, match="`check_reduction` argument"):
        DDPX(net(), check_reduction=True)
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        assert not DDPX(net(), broadcast_buffers=False).forward_sync_buffers
    with pytest.warns(FutureWarning, match="Both `broadcast_buffers` and `forward_sync_buffers`"):
        assert DDPX(net(), broadcast_buffers=False, forward_sync_buffers=True).broadcast_buffers


def differing(rank: int, world_size: int, what: str) -> str:
    module = net()
    options: dict[str, Any] = {}
    if rank == 1:
        match what:
            case "count":
                module.c = nn.Linear(2, 2)
            case "shape":
                module.b = nn.Linear(4, 3)
            case "stride":
                module.a.weight = nn.Parameter(module.a.weight.detach().t())
            case "dtype":
                module.b.double()
            case "frozen":
                module.b.bias.requires_grad_(False)
            case "buffer":
                module.register_buffer("extra", torch.zeros(1))
            case "setting":
                options["find_unused_parameters"] = True
    with pytest.raises(RuntimeError) as failure:
        DDPX(module, **options)
    return str(failure.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("count", "DDP expects same model across all ranks, but Rank 1 has 6 params, while rank 0 has inconsistent 4"),
        ("shape", "[1]: params[2] in this process with sizes [3, 4] appears not to match sizes of the same param in "),
        ("stride", "[1]: params[0] in this process with sizes [4, 4] appears not to match"),
        ("dtype", "DDP expects same model across all ranks, but they differ first at tensor 2: rank 0 has b.weight"),
        ("frozen", "DDP expects same model across all ranks, but they differ first at tensor 3: rank 0 has b.bias"),
        ("buffer", "DDP expects same model across all ranks, but rank 1 has 1 buffers, while rank 0 has 0."),
        ("setting", "every rank has to wrap its model with the same settings, but find_unused_parameters is False on"),
    ],
)
def test_models_that_differ_are_refused_with_the_same_words_on_every_rank(ranks, what, words) -> None:
    said = ranks(3).run(differing, what)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith(words)


def static_graph_broken(rank: int, world_size: int, first: bool) -> str:
    wrapper = DDPX(net(), static_graph=True)
    wrapper(data(rank), both=first).sum().backward()
    with pytest.raises(RuntimeError) as failure:
        wrapper(data(rank), both=not first).sum().backward()
    return str(failure.value)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (True, "Expected to have finished reduction in the prior iteration"),
        (False, "Your training graph has changed in this"),
    ],
)
def test_a_static_graph_that_changes_is_an_error_in_ddps_words(ranks, first, words) -> None:
    assert all(text.startswith(words) for text in ranks(2).run(static_graph_broken, first))


def unused(rank: int, world_size: int) -> str:
    wrapper = DDPX(net())
    with pytest.raises(RuntimeError) as failure:
        wrapper(data(rank), both=rank != 1).sum().backward()
    return str(failure.value) + wrapper._get_ddp_logging_data()["error"]


def test_an_unused_parameter_is_an_error_on_every_rank_that_names_it(ranks) -> None:
    for text in ranks(2).run(unused):
        assert text.startswith("Expected to have finished reduction in the prior iteration before starting a new one.")
        assert "did not receive grad for rank 1: b.weight, b.bias" in text
        assert "indices which did not receive grad for rank 1: 2 3" in text


def misuse(rank: int, world_size: int) -> None:
    wrapper = DDPX(net())
    with pytest.raises(ValueError, match="DDP runtime logging sample rate should be equal or greater than 1"):
        wrapper._set_ddp_runtime_logging_sample_rate(0)
    wrapper(data(rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"set_static_graph\(\) should be called before training loop starts"):
        wrapper._set_static_graph()
    with pytest.raises(NotImplementedError, match="Wrap the inner module anew"):
        wrapper._update_process_group(dist.group.WORLD)
    other = DDPX(net(), process_group=dist.new_group(list(range(world_size))))
    with pytest.raises(RuntimeError, match="DDP Pickling/Unpickling are only supported"):
        pickle.dumps(other)
    with pytest.raises(TypeError, match="sync_grads takes a DDPX"):
        ddpx.sync_grads(net())


def test_misuse_is_refused(ranks) -> None:
    ranks(2).run(misuse)


# ---- Arguments do what they say --------------------------------------------------------------------------------------


def trains(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    wrapper = DDPX(net(), **options)
    for step in range(3):
        wrapper.zero_grad()
        wrapper(data(rank, step)).pow(2).sum().backward()
        check(wrapper, mean_gradients(net, world_size, step))
    return wrapper._get_ddp_logging_data()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": 0.0001},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": -1},
        {"bucket_cap_mb_list": [1, 2]},
        {"batched_grad_copy": True},
        {"find_unused_parameters": True},
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
        {"static_graph": True},
        {"dim": 1},
        {"mode": "naive"},
        {"mode": "bucketed"},
        {"transport": "process_group"},
        {"algorithm": "ring"},
    ],
    ids=str,
)
def test_gradients_are_means_with(ranks, options) -> None:
    ranks(2).run(trains, options)


def device_mesh(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    wrapper = DDPX(net(), device_mesh=init_device_mesh("cpu", (world_size,)))
    wrapper(data(rank)).pow(2).sum().backward()
    check(wrapper, mean_gradients(net, world_size))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported, but got"):
        DDPX(net(), device_mesh=init_device_mesh("cpu", (world_size, 1)))


def test_a_mesh_of_one_dimension(ranks) -> None:
    ranks(2).run(device_mesh)


def skipped(rank: int, world_size: int) -> str:
    wrapper = DDPX(net(), skip_all_reduce_unused_params=True)
    wrapper(data(rank), both=False).sum().backward()
    assert {slot.name for bucket in wrapper.reducer.buckets for slot in bucket.slots} == {"a.weight", "a.bias"}
    assert wrapper.module.b.weight.grad is None
    with pytest.raises(RuntimeError) as failure:
        wrapper(data(rank)).sum().backward()
    return str(failure.value)


def test_skipped_unused_parameters_are_in_no_bucket_and_have_to_stay_unused(ranks) -> None:
    assert all("promises that it stays so" in text for text in ranks(2).run(skipped))


def skipped_after_a_hook(rank: int, world_size: int) -> str:
    """A communication hook has buckets laid out anew, now without parameters that the first layout had."""
    wrapper = DDPX(net(), skip_all_reduce_unused_params=True)
    wrapper(data(rank)).sum().backward()
    wrapper.zero_grad()
    wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    wrapper(data(rank), both=False).sum().backward()
    with pytest.raises(RuntimeError) as failure:
        wrapper(data(rank)).sum().backward()
    return str(failure.value)


def test_parameters_may_be_skipped_from_a_later_layout_on(ranks) -> None:
    assert all("promises that it stays so" in text for text in ranks(2).run(skipped_after_a_hook))


def delayed(rank: int, world_size: int) -> None:
    module = net()
    wrapper = DDPX(
        module,
        bucket_cap_mb=0.00001,
        delay_all_reduce_named_params=[("b.weight", module.b.weight), ("b.bias", module.b.bias)],
        param_to_hook_all_reduce=module.a.weight,
    )
    wrapper(data(rank)).pow(2).sum().backward()
    check(wrapper, mean_gradients(net, world_size))
    assert wrapper.reducer.buckets[-1].slots[-1].name.startswith("b.")


def test_delayed_parameters_are_reduced_last(ranks) -> None:
    ranks(2).run(delayed)


def ignored(rank: int, world_size: int) -> None:
    module = net(rank)
    module.register_buffer("mine", torch.tensor(float(rank)))
    DDPX._set_params_and_buffers_to_ignore_for_model(module, ["b.weight", "b.bias", "mine"])
    before = module.b.weight.detach().clone()
    wrapper = DDPX(module)
    wrapper(data(rank)).sum().backward()
    assert torch.equal(module.b.weight, before) and module.mine == rank
    assert [slot.name for slot in wrapper.reducer.slots] == ["a.weight", "a.bias"]
    assert wrapper.parameters_to_ignore == {"b.weight", "b.bias", "mine"}


def test_ignored_parameters_and_buffers_stay_local(ranks) -> None:
    ranks(2).run(ignored)


def init_sync(rank: int, world_size: int) -> tuple[float, float]:
    values = []
    for sync in (True, False):
        values.append(DDPX(net(rank), init_sync=sync).module.a.weight[0, 0].item())
    return values[0], values[1]


def test_init_sync_decides_whether_ranks_start_from_rank_0(ranks) -> None:
    first, second = ranks(2).run(init_sync)
    assert first[0] == second[0] and first[1] != second[1]


def low_precision(rank: int, world_size: int) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    seen = []
    module = net()
    module.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.a.weight.dtype)))
    half = torch.bfloat16
    wrapper = DDPX(module, mixed_precision=_MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half))
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(data(rank)).float().pow(2).sum().backward()
    assert seen == [(half, half)] * 2
    assert {bucket.flat.dtype for bucket in wrapper.reducer.buckets} == {half}
    for param, mean in zip(module.parameters(), mean_gradients(net, world_size), strict=True):
        assert param.dtype == param.grad.dtype == torch.float32
        torch.testing.assert_close(param.grad, mean, rtol=0.1, atol=0.1)


def test_mixed_precision_computes_and_reduces_in_bf16_and_keeps_fp32(ranks) -> None:
    ranks(2).run(low_precision)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def buffers(rank: int, world_size: int) -> list[float]:
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    found = []
    for options, location in [
        ({}, None),
        ({"forward_sync_buffers": False}, None),
        ({}, _BufferCommHookLocation.PRE_FORWARD),
        ({}, _BufferCommHookLocation.POST_FORWARD),
    ]:
        wrapper = DDPX(Counting(), **options)
        if location is not None:

            def add(state: Any, named: dict[str, Tensor]) -> None:
                dist.all_reduce(named["seen"])

            wrapper._register_buffer_comm_hook(None, add, location)
        wrapper.module.seen.fill_(rank + 1)
        wrapper(data(rank)).sum().backward()
        found.append(wrapper.module.seen.item())
    return found


def test_buffers_follow_rank_0_or_a_hook(ranks) -> None:
    assert ranks(2).run(buffers) == [[1.0, 1.0, 3.0, 3.0], [1.0, 2.0, 3.0, 3.0]]


# ---- Copies and reports ----------------------------------------------------------------------------------------------


def copies(rank: int, world_size: int) -> None:
    wrapper = DDPX(net())
    wrapper(data(rank)).pow(2).sum().backward()
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    for twin in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper)), torch.load(file, weights_only=False)):
        twin.zero_grad()
        twin(data(rank)).pow(2).sum().backward()
        check(twin, mean_gradients(net, world_size))
    state = wrapper.state_dict()
    assert list(state) == ["module." + name for name in net().state_dict()]
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    net(1).load_state_dict(state)


def test_pickle_deepcopy_and_plain_keys(ranks) -> None:
    ranks(2).run(copies)


def report(rank: int, world_size: int) -> list[str]:
    wrappers = [kind(net()) for kind in (DistributedDataParallel, DDPX)]
    for wrapper in wrappers:
        for step in range(3):
            wrapper(data(rank, step)).sum().backward()
    theirs, ours = (wrapper._get_ddp_logging_data() for wrapper in wrappers)
    for key in ("world_size", "rank", "module_name", "dtypes", "total_parameter_size_bytes", "num_parameter_tensors"):
        assert theirs[key] == ours[key], key
    assert ours["backward_comm_time"] > 0 and ours["avg_forward_compute_time"] > 0
    return sorted(set(theirs) - set(ours))


def test_the_logging_report_has_ddps_keys(ranks) -> None:
    assert ranks(2).run(report)[0] == []


# ---- Uneven inputs ---------------------------------------------------------------------------------------------------


def uneven(rank: int, world_size: int, initial: bool, module_kind: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    first = module_kind()
    wrapper = DDPX(copy.deepcopy(first), timeout_s=20, **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
    model, twin_optimizer = copy.deepcopy(first), None
    twin_optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [1 + 2 * peer for peer in range(world_size)]
    with wrapper.join(divide_by_initial_world_size=initial):
        for step in range(batches[rank]):
            optimizer.zero_grad()
            wrapper(data(rank, step)).pow(2).sum().backward()
            optimizer.step()
    for step in range(max(batches)):  # one process that does it all
        twin_optimizer.zero_grad()
        active = [peer for peer in range(world_size) if step < batches[peer]]
        divisor = world_size if initial else len(active)
        for peer in active:
            (model(data(peer, step)).pow(2).sum() / divisor).backward()
        twin_optimizer.step()
    for ours, wanted in zip(wrapper.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted)
    optimizer.zero_grad()
    wrapper(data(rank)).pow(2).sum().backward()  # an ordinary step after it


@pytest.mark.parametrize("initial", [True, False], ids=["initial", "active"])
def test_uneven_inputs_divide_as_asked_and_all_end_with_the_last_model(ranks, initial) -> None:
    ranks(3).run(uneven, initial, Net, {})
    ranks(2).run(uneven, initial, Counting, {})
    ranks(2).run(uneven, initial, Net, {"find_unused_parameters": True, "transport": "process_group"})


def early(rank: int, world_size: int) -> str:
    wrapper = DDPX(net(), timeout_s=20)
    with pytest.raises(RuntimeError) as failure:
        with wrapper.join(throw_on_early_termination=True):
            for step in range(1 + 2 * rank):
                wrapper(data(rank, step)).sum().backward()
    wrapper.zero_grad()
    wrapper(data(rank)).pow(2).sum().backward()
    check(wrapper, mean_gradients(net, world_size))
    return str(failure.value)


def test_early_termination_is_thrown_on_all_ranks(ranks) -> None:
    words = ranks(2).run(early)
    assert words[0].startswith("Rank 0 exhausted all inputs.")
    assert words[1].startswith("Detected at least one rank that exhausted inputs.")


def disabled(rank: int, world_size: int) -> None:
    wrapper = DDPX(net())
    with wrapper.join(enable=False):
        wrapper(data(rank)).pow(2).sum().backward()
    check(wrapper, mean_gradients(net, world_size))


def test_join_can_be_disabled(ranks) -> None:
    ranks(2).run(disabled)


def with_another_joinable(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapper = DDPX(net(), timeout_s=20)
    optimizer = ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1)
    with Join([wrapper, optimizer]):
        for step in range(1 + rank):
            optimizer.zero_grad()
            wrapper(data(rank, step)).sum().backward()
            optimizer.step()


def test_torchs_join_context_takes_it_together_with_other_joinables(ranks) -> None:
    ranks(2).run(with_another_joinable)


# ---- Sparse gradients ------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True)
        self.other = nn.EmbeddingBag(12, 3, sparse=True)
        self.fc = nn.Linear(3, 1)

    def forward(self, rows: Tensor, both: bool) -> Tensor:
        h = self.table(rows).sum(0, keepdim=True)
        return self.fc(h + self.other(rows[None]) if both else h)


def sparse(rank: int, world_size: int, transport: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(2)
        return Words()

    def rows(rank: int, step: int) -> Tensor:
        return torch.randint(0, 12, (2 + 40 * step,), generator=torch.Generator().manual_seed(rank + 7 * step))

    wrapper = DDPX(build(), find_unused_parameters=True, transport=transport)
    for step in range(3):
        wrapper.zero_grad()
        wrapper(rows(rank, step), both=step == 1).sum().backward()
        modules = []
        for peer in range(world_size):
            modules.append(build())
            modules[-1](rows(peer, step), both=step == 1).sum().backward()
        for ours, *others in zip(wrapper.parameters(), *(module.parameters() for module in modules), strict=True):
            if others[0].grad is None:
                assert ours.grad is None
                continue
            assert ours.grad.is_sparse == others[0].grad.is_sparse
            mean = sum(other.grad.to_dense() for other in others) / world_size
            torch.testing.assert_close(ours.grad.to_dense(), mean)


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_sparse_gradients_are_averaged_and_stay_sparse(ranks, transport) -> None:
    ranks(3).run(sparse, transport)


def warnings_at_construction(rank: int, world_size: int) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DDPX(net())
    return len(caught)


def test_the_plain_call_warns_of_nothing(ranks) -> None:
    assert ranks(2).run(warnings_at_construction) == [0, 0]
