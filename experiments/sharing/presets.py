"""Flags whose defaults depend on `--quick`."""

from absl import flags


def preset[T](flag: flags.FlagHolder[T | None], is_quick: bool, *, quick: T, full: T) -> T:
    """The flag's value; where it was not given, what the mode takes."""
    if flag.value is None:
        return quick if is_quick else full
    return flag.value
