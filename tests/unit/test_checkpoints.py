"""Tiny checkpoints: same arguments, same bytes; and a wrong KV page shows in the greedy tokens."""

import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest

from sgl_pd_connector.testing.checkpoints import EOS_ID, make_checkpoint, read_tensors
from sgl_pd_connector.testing.reference import KVCache, ReferenceModel

pytestmark = pytest.mark.unit

FAMILIES = ("qwen3", "llama")
PAGE = 16


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def printable(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(32, 127) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_arguments_give_the_same_bytes(tmp_path: Path, family: str, dtype: str) -> None:
    first = make_checkpoint(tmp_path / "a", family=family, dtype=dtype, seed=3)
    second = make_checkpoint(tmp_path / "b", family=family, dtype=dtype, seed=3)
    other = make_checkpoint(tmp_path / "c", family=family, dtype=dtype, seed=4)
    assert contents(first) == contents(second)
    assert contents(first)["model.safetensors"] != contents(other)["model.safetensors"]
    assert set(contents(first)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "recipe.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_an_existing_checkpoint_is_used_only_for_the_same_arguments(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    made_at = (directory / "model.safetensors").stat().st_mtime_ns
    assert make_checkpoint(directory) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made_at
    with pytest.raises(FileExistsError, match="was not made with these arguments"):
        make_checkpoint(directory, layers=3)
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match="remove it or choose another"):
        make_checkpoint(tmp_path / "other")


def test_processes_may_make_the_same_checkpoint_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(make_checkpoint, [directory] * 8) == [directory] * 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_default_directory_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_PD_CACHE", str(tmp_path))
    small, large = make_checkpoint(layers=1), make_checkpoint(layers=2)
    assert small.parent == large.parent == tmp_path / "checkpoints"
    assert small != large


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"heads": 3}, "multiple of kv_heads"),
        ({"head_dim": 7}, "must be even"),
        ({"vocab_size": 258}, "must be above 258"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, arguments: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_checkpoint(tmp_path / "model", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_tensors_have_the_shapes_of_the_config(tmp_path: Path) -> None:
    directory = make_checkpoint(
        tmp_path / "model", layers=3, kv_heads=1, heads=2, head_dim=64, vocab_size=300
    )
    tensors = read_tensors(directory)
    assert tensors["model.layers.2.self_attn.q_proj.weight"].shape == (128, 256)
    assert tensors["model.layers.2.self_attn.k_proj.weight"].shape == (64, 256)
    assert tensors["lm_head.weight"].shape == (300, 256)
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 3


def test_bfloat16_weights_are_the_rounded_float32_ones(tmp_path: Path) -> None:
    exact = read_tensors(make_checkpoint(tmp_path / "a", dtype="float32"))
    rounded = read_tensors(make_checkpoint(tmp_path / "b", dtype="bfloat16"))
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        np.testing.assert_allclose(rounded[name], tensor, rtol=2**-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_printable_varied_and_clear(tmp_path: Path, family: str) -> None:
    model = ReferenceModel(make_checkpoint(tmp_path / "model", family=family))
    answers = [model.greedy(printable(length, seed=length), 32) for length in range(5, 400, 13)]
    assert all(32 <= token < 127 for answer in answers for token in answer.tokens)
    assert EOS_ID not in {token for answer in answers for token in answer.tokens}
    # float32 rounding moves these logits by about 1e-5.
    assert min(answer.margin for answer in answers) > 1e-4
    assert min(len(set(answer.tokens)) for answer in answers) >= 5
    assert len({answer.text for answer in answers}) == len(answers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_does_not_depend_on_how_the_prompt_was_split(tmp_path: Path, family: str) -> None:
    model = ReferenceModel(make_checkpoint(tmp_path / "model", family=family))
    prompt = printable(150, seed=1)
    whole = model.greedy(prompt, 16)
    for cut in (1, 16, 149, 150):
        cache = KVCache()
        model.logits(prompt[:cut], cache)
        assert model.greedy(prompt, 16, cache).tokens == whole.tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("damage", ["missing", "foreign"])
def test_a_wrong_page_changes_the_answer(tmp_path: Path, family: str, damage: str) -> None:
    model = ReferenceModel(make_checkpoint(tmp_path / "model", family=family))
    noticed = []
    for length in (33, 70, 150, 300):
        prompt = printable(length, seed=length)
        expected = model.greedy(prompt, 16).tokens
        good, other = KVCache(), KVCache()
        model.logits(prompt, good)
        model.logits(printable(length, seed=1000 + length), other)
        for page in range((length - 1) // PAGE):
            rows = slice(page * PAGE, (page + 1) * PAGE)
            broken = KVCache([keys.copy() for keys in good.keys], [values.copy() for values in good.values])
            for target, source in zip(broken.keys + broken.values, other.keys + other.values, strict=True):
                target[rows] = 0 if damage == "missing" else source[rows]
            noticed.append(model.greedy(prompt, 16, broken).tokens != expected)
    assert sum(noticed) >= 0.95 * len(noticed)
