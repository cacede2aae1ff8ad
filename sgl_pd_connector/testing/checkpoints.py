"""Tiny random checkpoints in Hugging Face's format, for tests, demos and benchmarks that cannot download a
model.

Three properties matter more than realism:

* *The KV cache shows in the output.* Attention outweighs the embedding of the current token and differs from
  token to token, so a missing or foreign page of a prompt of a few hundred tokens changes the greedy answer
  (of thousands: in most cases). One thing no output can show: whole pages of a request that changed places,
  keys and values together, because attention does not depend on the order in which it reads them.
* *Tokens are exact.* Logits are well apart in float32, so the order of additions does not change the greedy
  choice.
* *Text is easy to reason about.* One byte is one token, id = byte value, nothing is added to a prompt; only
  printable ASCII is ever generated, so text round-trips and no request ends early by chance.

The files are written without the `tokenizers` and `safetensors` packages: both formats are a few lines, and
the environment of the unit tests holds no engine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Family = Literal["qwen3", "llama"]
Dtype = Literal["float32", "bfloat16"]

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
MAX_POSITIONS = 32768

_RECIPE_VERSION = 1
_HIDDEN = 256
_INTERMEDIATE = 512
_PRINTABLE = slice(32, 127)

# Standard deviation of the attention scores. 0 would be a plain average of the context, in which one page of
# hundreds hardly moves the result, and answers would soon repeat themselves. At 3 each query finds a few
# dozen tokens of its own.
_SCORE_STD = 3.0
# Attention averages random values, which makes them small. The embedding must stay below that, so the context
# decides; the MLP, which sees normalised inputs and so has a size of its own, may not drown it either.
_EMBEDDING_STD = 0.1
_MLP_GAIN = 0.5
_LOGIT_STD = 4.0

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class _Recipe:
    """Everything the bytes of a checkpoint depend on."""

    family: Family
    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    vocab_size: int
    dtype: Dtype
    seed: int
    version: int = _RECIPE_VERSION

    def check(self) -> None:
        if min(self.layers, self.kv_heads, self.heads, self.head_dim) < 1:
            raise ValueError("layers, kv_heads, heads and head_dim must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary embedding turns pairs")
        if self.vocab_size <= EOS_ID:
            raise ValueError(
                f"vocab_size ({self.vocab_size}) must be above {EOS_ID}: 256 bytes and 3 special tokens"
            )


def cache_directory() -> Path:
    """Directory for what can be made again: `$SGL_PD_CACHE`, by default `~/.cache/sgl-pd-connector`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SGL_PD_CACHE") or Path(base) / "sgl-pd-connector")


def make_checkpoint(
    directory: Path | None = None,
    *,
    family: Family = "qwen3",
    layers: int = 2,
    kv_heads: int = 2,
    heads: int = 4,
    head_dim: int = 128,
    vocab_size: int = 512,
    dtype: Dtype = "float32",
    seed: int = 0,
) -> Path:
    """Make a tiny random checkpoint and return its directory.

    Args:
        directory: where to put it; None for one in the cache directory that is named by the other arguments.
        family: model architecture.
        layers, kv_heads, heads, head_dim, vocab_size: the model's shape. Hidden size is 256.
        dtype: of the weights on disk and, by default, of the engine's computation and KV cache.
        seed: of the random weights.

    The same arguments give the same bytes. A directory appears complete or not at all, also when several
    processes make it at once; one that is there already is used as it is.

    Raises:
        ValueError: the shape is impossible.
        FileExistsError: `directory` exists and is not a checkpoint made with these arguments.
    """
    recipe = _Recipe(family, layers, kv_heads, heads, head_dim, vocab_size, dtype, seed)
    recipe.check()
    recipe_text = json.dumps(asdict(recipe), indent=2)
    if directory is None:
        digest = hashlib.sha256(recipe_text.encode()).hexdigest()[:12]
        directory = cache_directory() / "checkpoints" / f"{family}-{dtype}-{digest}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            _write_files(scratch, recipe, recipe_text)
            scratch.chmod(0o755)
            scratch.rename(directory)
        except OSError:
            if (
                not directory.exists()
            ):  # otherwise another process was faster, and its files are checked below
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    made_with = directory / "recipe.json"
    if not made_with.is_file() or made_with.read_text() != recipe_text:
        raise FileExistsError(
            f"{directory} exists and was not made with these arguments: remove it or choose another"
        )
    return directory


def read_tensors(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Read the weights of a checkpoint made here, by their Hugging Face names, as float32."""
    data = (directory / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            stored = np.float32 if entry["dtype"] == "F32" else ml_dtypes.bfloat16
            flat = np.frombuffer(data[start + begin : start + end], stored)
            tensors[name] = flat.reshape(entry["shape"]).astype(np.float32)
    return tensors


def _write_files(directory: Path, recipe: _Recipe, recipe_text: str) -> None:
    documents: dict[str, dict[str, Any]] = {
        "config.json": _config(recipe),
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TOKEN,
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2))
    _write_tensors(directory / "model.safetensors", recipe)
    (directory / "recipe.json").write_text(recipe_text)


def _config(recipe: _Recipe) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM" if recipe.family == "qwen3" else "LlamaForCausalLM"],
        "model_type": recipe.family,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "vocab_size": recipe.vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": recipe.dtype,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: one byte is one token whose id is the byte's value."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    specials = ((PAD_ID, PAD_TOKEN), (BOS_ID, BOS_TOKEN), (EOS_ID, EOS_TOKEN))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": content, **flags} for token_id, content in specials],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def _byte_symbols() -> list[str]:
    """The printable stand-in that byte-level BPE uses for each byte (GPT-2's alphabet), by byte value."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


def _tensors(recipe: _Recipe) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    # The legacy generator's stream is frozen by NumPy; that of default_rng may change between releases.
    random = np.random.RandomState(recipe.seed)

    def matrix(rows: int, columns: int, std: float) -> npt.NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * std).astype(np.float32)

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        """Weights that turn inputs of unit variance into outputs with a standard deviation of `gain`."""
        return matrix(outputs, inputs, gain / math.sqrt(inputs))

    def constant(size: int, value: float = 1.0) -> npt.NDArray[np.float32]:
        return np.full(size, value, np.float32)

    query_size, kv_size = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    # Scores are q·k / sqrt(head_dim), of which each side brings half the spread. Qwen3 normalises q and k, so
    # there the spread sits in the norm's weights; in Llama it sits in the projections.
    spread = math.sqrt(_SCORE_STD)
    qk_gain = 1.0 if recipe.family == "qwen3" else spread

    yield "model.embed_tokens.weight", matrix(recipe.vocab_size, _HIDDEN, _EMBEDDING_STD)
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", constant(_HIDDEN)
        yield f"{prefix}.self_attn.q_proj.weight", linear(query_size, _HIDDEN, qk_gain)
        yield f"{prefix}.self_attn.k_proj.weight", linear(kv_size, _HIDDEN, qk_gain)
        yield f"{prefix}.self_attn.v_proj.weight", linear(kv_size, _HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", linear(_HIDDEN, query_size)
        if recipe.family == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", constant(recipe.head_dim, spread)
            yield f"{prefix}.self_attn.k_norm.weight", constant(recipe.head_dim, spread)
        yield f"{prefix}.post_attention_layernorm.weight", constant(_HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", linear(_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", linear(_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", linear(_HIDDEN, _INTERMEDIATE, _MLP_GAIN)
    yield "model.norm.weight", constant(_HIDDEN)
    head = np.zeros((recipe.vocab_size, _HIDDEN), np.float32)
    head[_PRINTABLE] = linear(head[_PRINTABLE].shape[0], _HIDDEN, _LOGIT_STD)
    yield "lm_head.weight", head


def _write_tensors(path: Path, recipe: _Recipe) -> None:
    stored, name_of_dtype = (np.float32, "F32") if recipe.dtype == "float32" else (ml_dtypes.bfloat16, "BF16")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, tensor in _tensors(recipe):
        begin = len(body)
        body += tensor.astype(stored).tobytes()
        header[name] = {
            "dtype": name_of_dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(body)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
