"""Layers of torch.nn on ShardTensors: what no sample of the sweep says."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.harness import held
from tests.oracle import check
from weft import P
from weft.nn import modules
from weft.ops import FUNCTIONS
from weft.tensor.placing import left_whole
from weft.testing import peak_memory

BATCH = 6


def on_ranks(program: Any, num: int = 3) -> list[Any]:
    return weft.testing.run(program, mesh={"x": num})


def ragged(x: Tensor, mesh: Any, dim: int = 0) -> Any:
    """Cut so that the rank in the middle has nothing."""
    spec = P(*[None] * dim, "x")
    sizes = {dim: (x.shape[dim] - 1, 0, 1)}
    return weft.distribute_tensor(x, mesh, weft.Layout(mesh, tuple(x.shape), spec, sizes=sizes))


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# What a cut batch needs of other ranks.

X, LINE, IMAGE = values(BATCH, 8), values(BATCH, 5, 8), values(BATCH, 8, 6, 5)

SILENT: dict[str, tuple[Any, Tensor]] = {
    "Linear": (lambda: nn.Linear(8, 3), X),
    "LayerNorm": (lambda: nn.LayerNorm(8), LINE),
    "RMSNorm": (lambda: nn.RMSNorm(8), LINE),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGE),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), IMAGE),
    "BatchNorm2d evaluated": (lambda: nn.BatchNorm2d(8).eval(), IMAGE),
    "Conv2d": (lambda: nn.Conv2d(8, 4, 3, padding=1), IMAGE),
    "Conv2d groups": (lambda: nn.Conv2d(8, 8, 3, groups=4), IMAGE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 4, 3), IMAGE),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), IMAGE),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, 2), IMAGE),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "Unfold": (lambda: nn.Unfold(2), IMAGE),
    "LSTM": (lambda: nn.LSTM(8, 3, 2, batch_first=True, dropout=0.5), LINE),
    "GRU": (lambda: nn.GRU(8, 3, bidirectional=True, batch_first=True), LINE),
    "RNN": (lambda: nn.RNN(8, 3, batch_first=True), LINE),
    "LSTMCell": (lambda: nn.LSTMCell(8, 3), X),
    "GRUCell": (lambda: nn.GRUCell(8, 3), X),
    "RNNCell": (lambda: nn.RNNCell(8, 3), X),
    "Dropout2d": (nn.Dropout2d, IMAGE),
    "Softmax2d": (nn.Softmax2d, IMAGE),
    "Flatten": (nn.Flatten, IMAGE),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), LINE),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_cut_batch_needs_nothing_of_others(name: str) -> None:
    make, x = SILENT[name]
    module = make().double()

    def on_rank(mesh: Any) -> Any:
        for cut in (weft.distribute_tensor(x, mesh, P("x")), ragged(x, mesh)):
            with weft.explain() as log:
                out = copy.deepcopy(module)(cut)
            out = out[0] if isinstance(out, tuple) else out
            assert sum(event.nbytes for event in log.events) == 0, log.events
            assert out.sharding.dims[0] == (0,) and out.sharding.cuts[0] == cut.sharding.cuts[0]
        return True

    assert on_ranks(on_rank) == [True] * 3


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_of_a_cut_batch_stays(need_weights: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4).double()
    x, padding = values(5, BATCH, 8), torch.zeros(BATCH, 5, dtype=torch.bool)
    due, weights = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)

    def on_rank(mesh: Any) -> Any:
        q = weft.distribute_tensor(x, mesh, P(None, "x"))
        mask = weft.distribute_tensor(padding, mesh, P("x"))
        with weft.explain() as log:
            out, found = module(q, q, q, key_padding_mask=mask, need_weights=need_weights)
        assert not log.events
        assert str(out.sharding.dims) == "((), (0,), ())"
        torch.testing.assert_close(out.full_tensor(), due)
        if need_weights:
            assert found.sharding.dims[0] == (0,)
            torch.testing.assert_close(found.full_tensor(), weights)
        return True

    assert on_ranks(on_rank) == [True] * 3


MASKS: dict[str, dict[str, Any]] = {
    "none": {}, "causal": {"attn_mask": torch.ones(10, 10).triu(1).bool()},
    "each": {"attn_mask": (torch.arange(800) % 7 < 3).view(8, 10, 10)},
    "padded": {"key_padding_mask": torch.arange(20).view(2, 10) % 9 > 6},
}
TOKENS = {"tokens": P("x"), "ragged": [weft.Shard(0, sizes=(0, 7, 3)), weft.Replicate()],
          "both": P(("y", "x")), "batch": P("x", "y")}


@pytest.mark.parametrize("way", TOKENS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("average", [False, True])
def test_weights_of_sharded_tokens(average: bool, name: str, way: str) -> None:
    """Their mean over heads is sharded as the queries are: no rank has the rows of all."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4).double()
    x = values(10, 2, 8)

    def outcome(layer: Any, x: Any) -> list[Any]:
        out, weights = layer(x.requires_grad_(), x, x, average_attn_weights=average, **MASKS[name])
        (out.square().sum() + weights.pow(3).sum()).backward()
        if average and type(x) is weft.ShardTensor:
            assert weights.sharding.dims[1] == out.sharding.dims[0] == x.sharding.dims[0]
        return [out.detach(), weights.detach(), x.grad]

    got = weft.testing.run(lambda mesh: [held(one) for one in outcome(
        weft.distribute_module(copy.deepcopy(module), mesh),
        weft.distribute_tensor(x.clone(), mesh, TOKENS[way], src_data_rank=None))],
        mesh={"x": 3, "y": 2})
    for place, due in enumerate(outcome(module, x.clone())):
        check(due, [mine[place] for mine in got], f"{name} {way} {place}", 1e-11)


def test_weights_of_sharded_heads_and_tokens() -> None:
    """Heads that parameters shard stay; the mean over them is a sum of what ranks have."""
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 4).double(), values(10, 2, 8)
    due, weights = module(x, x, x)

    def on_rank(mesh: Any) -> Any:
        layer = weft.distribute_module(copy.deepcopy(module), mesh, shardings={
            "in_proj_weight": P("y"), "in_proj_bias": P("y"), "out_proj.weight": P(None, "y")})
        out, found = layer(*[weft.distribute_tensor(x, mesh, P("x"), src_data_rank=None)] * 3)
        assert found.sharding.dims[1] == (0,)
        return held(out), held(found)

    got = weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
    check(due.detach(), [one for one, _ in got], "out", 1e-11)
    check(weights.detach(), [one for _, one in got], "weights", 1e-11)


@pytest.mark.parametrize("shapes", [((5, 8), (5, 8)), ((5, 3, 8), (6, 3, 8))])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_attention_put_otherwise_is_torchs(shapes: Any, separate: bool, extra: bool) -> None:
    mine = FUNCTIONS[F.multi_head_attention_forward].compose
    query, key = values(*shapes[0]), values(*shapes[1])
    batch, lengths = query.shape[1:-1], (query.shape[0], key.shape[0])
    mask = values(*lengths) > 1
    padding = torch.zeros(*batch, lengths[1], dtype=torch.bool)
    padding[..., -1] = True
    each = torch.cat([mask.unsqueeze(0)] * 2 * (batch[0] if batch else 1))
    masks = [(None, None), (mask, None), (None, padding), (each, padding), (values(*lengths), None)]
    weight = values(24, 8)
    for (given, padded), needs, average, causal in itertools.product(
        masks, (False, True), (False, True), (False, True)
    ):
        if causal and given is None:
            continue
        args = (
            query, key, key, 8, 2, None if separate else weight, values(24),
            values(1, 1, 8) if extra else None, values(1, 1, 8) if extra else None, extra, 0.5,
            values(8, 8), values(8),
        )
        options = {
            "training": False, "key_padding_mask": padded, "need_weights": needs,
            "attn_mask": given, "use_separate_proj_weight": separate,
            "average_attn_weights": average, "is_causal": causal,
            **dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"),
                       weight.chunk(3) if separate else (None,) * 3)),
        }
        assert mine is not None
        found, due = mine(*args, **options), F.multi_head_attention_forward(*args, **options)
        torch.testing.assert_close(found[0], due[0], equal_nan=True)
        assert found[0].stride() == due[0].stride()
        assert (found[1] is None) == (due[1] is None)
        if due[1] is not None:
            torch.testing.assert_close(found[1], due[1], equal_nan=True)


def test_attention_raises_what_torch_raises() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(values(5, BATCH, 8), mesh, P(None, "x"))
        module = nn.MultiheadAttention(8, 4).double()
        with pytest.raises(RuntimeError, match="shape of the 2D attn_mask"):
            module(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.bool))
        with pytest.raises(AssertionError, match="expecting embedding dimension"):
            nn.MultiheadAttention(4, 2).double()(x, x, x)

    on_ranks(on_rank)


# Statistics of the global batch.


def trained(module: nn.Module, xs: list[Any]) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for x in xs:
        optimizer.zero_grad()
        (module(x) ** 3).mean().backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_network_with_batch_norm_learns_as_on_one_device(
    kind: Any, momentum: float | None, distributed: bool
) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(8, 4, 3), kind(4, momentum=momentum), nn.ReLU(), nn.Flatten(),
            nn.Linear(48, 5), nn.BatchNorm1d(5),
        ).double()

    steps = [values(BATCH, 8, 6, 5) + step for step in range(3)]
    due = trained(network(), steps)

    def on_rank(mesh: Any) -> Any:
        module = network()
        if distributed:
            shardings = {"0.*": P("x"), "1.running_*": P("x")}
            weft.nn.distribute_module(module, mesh, shardings=shardings)
        found = trained(module, [ragged(x, mesh) for x in steps]).eval()
        out = found(ragged(steps[0], mesh)).full_tensor()
        return [one.full_tensor() if isinstance(one, weft.ShardTensor) else one.detach()
                for one in (*found.parameters(), *found.buffers())], out.detach()

    for state, out in on_ranks(on_rank):
        for mine, wanted in zip(state, (*due.parameters(), *due.buffers()), strict=True):
            torch.testing.assert_close(mine, wanted.detach())
        torch.testing.assert_close(out, due.eval()(steps[0]).detach())


@pytest.mark.parametrize("order", (torch.contiguous_format, torch.channels_last), ids=str)
@pytest.mark.parametrize("name", ("batch_norm", "instance_norm"))
def test_norms_of_one_sample_take_gradients_in_any_order(name: str, order: Any) -> None:
    """As those of tokens, which are views of several orders where a rank has one sample: torch's
    kernels misread them."""
    channels = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)

    def program(mesh: Any) -> list[Tensor]:
        x: Any = IMAGE[:3].to(memory_format=order)
        x = (x if mesh is None else weft.distribute_tensor(x, mesh, P("x"))).requires_grad_()
        # By tokens and back, which leaves a view; in one process it is of three samples.
        odd = x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(x.shape)
        for given in (x, odd):
            if name == "instance_norm" and mesh is not None:
                y = F.instance_norm(given)
            elif name == "instance_norm":  # by the formula: one process misreads them, too
                var, mean = torch.var_mean(given, (2, 3), correction=0, keepdim=True)
                y = (given - mean) * (var + 1e-5).rsqrt()
            else:
                y = F.batch_norm(given, channels, channels, channels)
            tokens = F.linear(y.flatten(2).transpose(1, 2), X)
            (tokens * tokens.cos()).sum().backward(retain_graph=True)
        return [y.detach(), x.grad]

    due = program(None)
    for found in on_ranks(lambda mesh: [one.full_tensor() for one in program(mesh)]):
        torch.testing.assert_close(found, due, rtol=1e-10, atol=1e-10)


def test_batch_norm_receives_a_few_numbers_per_channel() -> None:
    def on_rank(mesh: Any) -> tuple[int, int]:
        x = ragged(IMAGE, mesh).requires_grad_()
        module = nn.BatchNorm2d(8).double()
        with weft.explain() as log:
            module(x).square().sum().backward()
        there = sum(event.nbytes for event in log.events if event.direction == "forward")
        return there, sum(event.nbytes for event in log.events) - there

    # An all-reduce is twice 2/3 of 8 channels' numbers: forward of means and variances, backward of
    # the gradients of means, of scales and of biases; and the loss.
    for there, back in on_ranks(on_rank):
        assert there == 2 * 11 * 8 and back <= 3 * 11 * 8 + 2 * 8


def test_batch_norm_keeps_one_tensor_for_backward() -> None:
    def train(x: Any) -> int:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
        with peak_memory(x) as memory:
            nn.Sequential(*parts)(x).square().sum().backward()
        return memory.peak

    field = torch.randn(1, 4, 64, 32)
    alone = train(field)
    for peak in weft.testing.run(
        lambda mesh: train(weft.distribute_tensor(field, mesh, P(None, None, "x"))), mesh={"x": 4}):
        assert peak < 1.25 * alone / 4, peak / alone


def test_statistics_of_running_buffers_are_alike_on_all_ranks() -> None:
    def on_rank(mesh: Any) -> list[list[float]]:
        module = nn.BatchNorm1d(8)
        for _ in range(2):
            module(weft.distribute_tensor(X.float(), mesh, P("x")))
        return [one.tolist() for one in module.buffers()]

    first, *others = on_ranks(on_rank)
    assert others == [first] * 2 and first[2] == 2


def test_named_rows_of_an_embedding_shrink_where_they_lie() -> None:
    torch.manual_seed(0)
    module = nn.Embedding(9, 4, max_norm=1.0).double()
    rows, named = module.weight.detach().clone(), torch.tensor([[1, 7], [0, 7], [3, 3]])
    due = module(named).detach()

    def on_rank(mesh: Any) -> None:
        table = weft.distribute_tensor(rows, mesh, P("x"))
        with weft.explain() as log:
            found = F.embedding(weft.distribute_tensor(named, mesh, P("x")), table, max_norm=1.0)
        assert max(event.nbytes for event in log.events) <= named.nbytes + due.nbytes
        torch.testing.assert_close(found.full_tensor(), due)
        torch.testing.assert_close(table.full_tensor(), module.weight.detach())

    on_ranks(on_rank)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_margin_loss_of_a_single_row(reduction: str) -> None:
    x, labels = values(6), torch.tensor([2, 0, -1, 1, 1, 1])
    due = F.multilabel_margin_loss(x, labels, reduction=reduction)

    def on_rank(mesh: Any) -> None:
        one, other = (weft.distribute_tensor(one, mesh, P("x")) for one in (x, labels))
        found = F.multilabel_margin_loss(one, other, reduction=reduction)
        assert found.shape == ()
        torch.testing.assert_close(found.full_tensor(), due)

    on_ranks(on_rank)


# Recurrent networks.


def test_packed_sequences_are_right() -> None:
    torch.manual_seed(0)
    module = nn.LSTM(8, 3).double()
    x, lengths = values(5, BATCH, 8), torch.tensor([5, 2, 4, 4, 1, 3])

    def run(x: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, (h, _) = module(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out)
        return padded, h, *torch.autograd.grad((padded**2).sum() + (h**3).sum(), x)

    wanted = run(x.requires_grad_())

    def on_rank(mesh: Any) -> Any:
        return [one.full_tensor().detach()
                for one in run(weft.distribute_tensor(x, mesh, P(None, "x")).requires_grad_())]

    left_whole._WARNED.discard("_pack_padded_sequence")
    with pytest.warns(weft.WeftWarning, match="torch cannot tell its result without the data"):
        outcomes = on_ranks(on_rank)
    for found in outcomes:
        torch.testing.assert_close(found, [one.detach() for one in wanted])


def test_weights_that_are_assigned_are_those_that_run() -> None:
    """A recurrent network keeps its weights in a list, too."""
    source = nn.LSTM(4, 3).double().state_dict()
    x = values(5, BATCH, 4)

    def on_rank(mesh: Any) -> None:
        module = weft.nn.distribute_module(nn.LSTM(4, 3).double(), mesh,
                                           shardings={"weight*": P("x")})
        module.load_state_dict(source, assign=True)
        assert [id(one) for one in module._flat_weights] == [
            id(one) for one in module.parameters()]
        module(weft.distribute_tensor(x, mesh, P(None, "x")))[0].sum().backward()
        assert all(one.grad is not None for one in module.parameters())

    on_ranks(on_rank)


def test_weights_of_recurrent_networks_stay_in_their_blocks(monkeypatch: Any) -> None:
    """On a GPU torch asks for their addresses, to put them into one piece."""
    asked: list[nn.RNNBase] = []
    monkeypatch.setitem(nn.RNNBase.flatten_parameters.__kwdefaults__, "_weft_answer_",
                        partial(modules.flatten_parameters, asked.append))

    def on_rank(mesh: Any) -> Any:
        plain = nn.GRU(4, 3)
        asked.clear()
        module = weft.nn.distribute_module(plain, mesh, shardings={"weight*": P("x")})
        return module.double().weight_ih_l0.sharding.dims[0], bool(asked)  # type: ignore[index]

    assert on_ranks(on_rank, 2) == [((0,), False)] * 2
    module = nn.GRU(4, 3)
    module.flatten_parameters()
    assert asked == [module] * 2


def test_dropout_between_layers_ignores_the_layout() -> None:
    module = nn.GRU(8, 3, 3, dropout=0.5).double()
    x = values(5, BATCH, 8)

    def on_rank(mesh: Any) -> Any:
        found = []
        for spec in (P(), P(None, "x"), P("x")):
            torch.manual_seed(3)
            found.append(module(weft.distribute_tensor(x, mesh, spec))[0].full_tensor().detach())
        return found

    (alone,) = on_ranks(on_rank, 1)
    for found in on_ranks(on_rank):
        for one in found:
            torch.testing.assert_close(one, alone[0])
    assert (module.eval()(x)[0] - alone[0]).abs().max() > 1e-3
