"""Check digits: what tells a card or an identity number from any other number of its shape.

Rule: a proof takes the text that a pattern matched, and trusts the pattern for its shape. No proof says more than "could be issued".
"""

_CN_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_CN_CHECKS = b"10X98765432"
_ES_LETTERS = b"TRWAGMYFPDXBNJZSQVHLCKE"
_ES_FOREIGN = bytes.maketrans(b"XYZ", b"012")
_SEPARATORS = b" -."
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
_NEVER_ISSUED = (b"000", b"666")


def luhn(text: bytes) -> bool:
    """Bank cards, ISO/IEC 7812-1."""
    digits = [byte - 48 for byte in text.translate(None, _SEPARATORS)]
    return (sum(digits[-1::-2]) + sum([_DOUBLED[digit] for digit in digits[-2::-2]])) % 10 == 0


def china(text: bytes) -> bool:
    """Resident identity numbers of China, GB 11643-1999."""
    total = sum([weight * (byte - 48) for weight, byte in zip(_CN_WEIGHTS, text[:17], strict=True)])
    return _CN_CHECKS[total % 11] == text[17:18].upper()[0]


def united_states(text: bytes) -> bool:
    """Social security numbers: areas, groups and serials that were never issued are none."""
    area, group, serial = text.split(b"-")
    return area not in _NEVER_ISSUED and not area.startswith(b"9") and group != b"00" and serial != b"0000"


def spain(text: bytes) -> bool:
    """DNI and NIE: the last letter is the number modulo 23."""
    number = text.translate(_ES_FOREIGN, b"-")
    return _ES_LETTERS[int(number[:-1]) % 23] == text[-1]


def france(text: bytes) -> bool:
    """NIR: the last two digits are 97 minus the number modulo 97."""
    digits = text.translate(None, _SEPARATORS)
    return 97 - int(digits[:13]) % 97 == int(digits[13:])


def brazil(text: bytes) -> bool:
    """CPF: two check digits modulo 11."""
    digits = [byte - 48 for byte in text.translate(None, _SEPARATORS)]
    if len(set(digits)) == 1:
        return False
    for length in (9, 10):
        total = sum([digit * (length + 1 - at) for at, digit in enumerate(digits[:length])])
        if total * 10 % 11 % 10 != digits[length]:
            return False
    return True


def certain(_: bytes) -> bool:
    """The shape says enough."""
    return True
