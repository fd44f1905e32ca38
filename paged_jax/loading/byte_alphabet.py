"""GPT-2's spelling of bytes in vocabularies: one printable character for each of the 256 bytes."""

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]


def _characters() -> list[str]:
    """Printable bytes stand for themselves, the others for the characters from 256 on."""
    others = iter(range(256, 512))
    return [chr(byte if byte in _PRINTABLE else next(others)) for byte in range(256)]


BYTE_TO_CHARACTER = tuple(_characters())
CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(BYTE_TO_CHARACTER)}
