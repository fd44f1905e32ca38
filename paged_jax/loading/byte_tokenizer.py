"""GPT-2's alphabet for bytes; a tokenizer of the 256 bytes, for models that train in a minute."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged_jax.loading import tokenizer as transformers_tokenizer

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]


def _characters() -> list[str]:
    """Printable bytes stand for themselves, the others for the characters from 256 on."""
    others = iter(range(256, 512))
    return [chr(byte if byte in _PRINTABLE else next(others)) for byte in range(256)]


CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(_characters())}
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"  # ids 256, 257, 258

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def build_byte_tokenizer() -> transformers_tokenizer.Tokenizer:
    """Id b is byte b; bos, eos and pad follow. `save_pretrained` writes it for AutoTokenizer."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(CHARACTER_TO_BYTE), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (BOS, EOS, PAD)])
    return transformers_tokenizer.wrap(
        tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=_CHAT_TEMPLATE
    )
