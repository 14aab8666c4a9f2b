"""The models learn, are the size they say, and agree with themselves."""

import pytest
import torch
from torch import Tensor

import models
from models.data import Corpus, synthetic_images
from models.gpt import GPT, GPTConfig


def parameters(name: str, size: str, **options: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in models.build(name, size, **options).parameters())


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load(models.__path__[0])


@pytest.mark.parametrize("name", models.MODELS)
def test_a_few_steps_lower_the_loss(name: str, corpus: Corpus) -> None:
    torch.manual_seed(0)
    model = models.build(name, "nano", block_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = synthetic_images if name == "resnet" else corpus.batch

    def loss(step: int) -> Tensor:
        return model(*draw("train", 16, 32, seed=0, step=step))[1]

    with torch.no_grad():
        before = loss(100)
    for step in range(10):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    with torch.no_grad():
        assert loss(100) < before - 0.5


@pytest.mark.parametrize(
    ("name", "size", "expected", "options"),
    [
        ("gpt", "small", 124.4e6, {"vocab_size": 50257, "block_size": 1024}),
        ("gpt", "medium", 354.8e6, {"vocab_size": 50257, "block_size": 1024}),
        ("gpt", "nano", 4.84e6, {}),
        ("mlp", "nano", 2.90e6, {}),
        ("resnet", "small", 11.17e6, {}),  # ResNet-18 for CIFAR-10
        ("resnet", "medium", 21.28e6, {}),  # ResNet-34
    ],
)
def test_sizes_are_the_known_ones(name: str, size: str, expected: float, options: dict[str, int]) -> None:
    assert parameters(name, size, **options) == pytest.approx(expected, rel=2e-3)


def test_both_attentions_give_the_same_logits_and_gradients() -> None:
    results = []
    for attention in ("sdpa", "manual"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(2, 2, 16, 32, 8, attention=attention)).double()
        tokens = torch.arange(16).view(2, 8)
        logits, loss = model(tokens, tokens)
        loss.backward()
        results.append((logits, model.embedding.weight.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)  # its own tolerance for float64: the sums are in another order


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_a_position_sees_only_what_came_before(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, "nano", block_size=8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    with torch.no_grad():
        differ = (model(tokens)[0] - model(changed)[0]).abs().amax(-1)[0]
    assert differ[:5].max() < 1e-5  # products of other shapes round otherwise
    assert differ[5] > 1e-3


def test_gpt_ties_its_head_to_the_embedding_only_if_asked() -> None:
    tied, untied = GPT.from_size("nano"), GPT.from_size("nano", tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert tied.matmul_parameters() == untied.matmul_parameters()


def test_gpt_without_bias_has_none() -> None:
    assert not [name for name, _ in GPT.from_size("nano", bias=False).named_parameters() if name.endswith("bias")]


def test_gpt_without_targets_gives_logits_and_no_loss() -> None:
    logits, loss = GPT.from_size("nano", block_size=8)(torch.zeros(2, 5, dtype=torch.long))
    assert logits.shape == (2, 5, 256)
    assert loss is None


def test_the_loss_of_a_bf16_model_is_computed_in_fp32() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert models.build("gpt", "nano").bfloat16()(tokens, tokens)[1].dtype == torch.float32


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="no model is called 'bert'; there are gpt, mlp, resnet"):
        models.build("bert", "nano")
    for name in models.MODELS:
        with pytest.raises(ValueError, match=f"{name} has no size 'huge'; its sizes are nano, small, medium"):
            models.build(name, "huge")
    with pytest.raises(ValueError, match="width 10 and 3 heads"):
        GPTConfig(1, 3, 10)
    with pytest.raises(ValueError, match="sequence of 9 tokens does not fit this GPT's 8 positions"):
        GPT.from_size("nano", block_size=8)(torch.zeros(1, 9, dtype=torch.long))
