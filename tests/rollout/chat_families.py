"""Small tokenizers whose chat templates behave like those of families of models.

The templates are written for these tests; what they do is what the families' own ones do.
"""

from __future__ import annotations

import functools

import tokenizers
import transformers

from bpo_jax.models import tokenizer

TEXTS = ["You are in a room. You see a drawer 1, a drawer 2.", "go to drawer 1", "Nothing happens."]

CHATML = """
{%- if messages[0].role != 'system' and default_system -%}
{{ '<|im_start|>system\\n' + default_system + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Thoughts of turns before the last question are taken out; without thinking, an empty one is given.
QWEN3 = """
{%- set last = namespace(question=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}
{%- set last.question = loop.index0 -%}
{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set said = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < last.question and '</think>' in said -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}
"""

# A turn opens inside a thought; of earlier turns only what follows the thought is left.
DEEPSEEK = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}
{%- else -%}{{ '<|user|>' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|><think>\\n' }}{%- endif -%}
"""

# Thoughts are always there: an earlier turn without one is given an empty one.
ALWAYS_THINKS = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and '</think>' not in m.content -%}{{ '<think></think>' }}{%- endif -%}
{{ m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""

# Messages are stripped, a system message tells the date, whether or not there is one.
LLAMA = """
{{- bos_token -}}
{%- if not date_string is defined -%}
{%- if clock -%}{%- set date_string = strftime_now('%d %b %Y') -%}
{%- else -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}
{%- endif -%}
{%- set told = namespace(text='') -%}
{%- if messages[0].role == 'system' -%}
{%- set told.text = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{{ head('system') + 'Knowledge ends: 2023\\nToday: ' + date_string + '\\n\\n' }}
{{- told.text + '<|eot_id|>' }}
{%- for m in messages -%}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ head('assistant') }}{%- endif -%}
"""
_LLAMA_HEAD = (
    "{%- macro head(role) -%}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{%- endmacro -%}"
)

# The flag is not looked at: a turn is never opened.
NEVER_OPENS = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
"""

TEMPLATES = {
    "own": tokenizer.CHAT_TEMPLATE,
    "qwen2.5": "{%- set default_system = 'You are Test, a helpful assistant.' -%}" + CHATML,
    "smollm2": "{%- set default_system = 'You are Smol.' -%}" + CHATML,
    "qwen3": QWEN3,
    "llama-3.1": _LLAMA_HEAD + LLAMA,
    "deepseek-r1": DEEPSEEK,
    "always-thinks": ALWAYS_THINKS,
    "never-opens": NEVER_OPENS,
    "always-opens": NEVER_OPENS + "{{ '<|im_start|>assistant\\n' }}",
}
FAMILIES = tuple(TEMPLATES)

_SPECIAL = {
    "llama-3.1": [
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    ],
    "deepseek-r1": ["<|begin|>"],
}  # fmt: skip
_BEGIN = {"llama-3.1": "<|begin_of_text|>", "deepseek-r1": "<|begin|>"}
_END = {"llama-3.1": "<|eot_id|>"}


@functools.cache
def make(family: str) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer of a family; it must not be changed."""
    made = tokenizer.train(TEXTS * 3, vocab_size=300)
    if family.startswith("qwen"):
        # Characters are composed, as Qwen's own tokenizer does.
        made.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    special = _SPECIAL.get(family, ["<|im_start|>"])
    made.add_special_tokens({"additional_special_tokens": special})
    if family in _BEGIN:
        made.bos_token = _BEGIN[family]
    made.eos_token = _END.get(family, tokenizer.STOP)
    # Added to the vocabulary, but no special tokens: text may hold them.
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.chat_template = TEMPLATES[family]
    return made
