"""Options of an experiment: from the fields of a dataclass to flags, and back with their values."""

from dataclasses import dataclass
from typing import Literal

import pytest
from absl import flags

from experiments.lib.options import (
    Options,
    SimulationOptions,
    as_dict,
    define,
    engine_option,
    engine_options,
    from_flags,
    option,
)
from paged_jax.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    rounds: int = option(5, "Rounds are this many.", quick=3, least=2, most=9)
    limit: float | None = option(None, "A ratio is at most this.", least=0)
    rates: tuple[float, ...] = option((1.0, 2.0), "Rates are these.", least=0.5, most=8)
    sizes: tuple[int, ...] | None = option(None, "Sizes are these.", quick=(16, 64), least=1)
    systems: tuple[str, ...] = option(("paged",), "These run.", choices=("paged", "orca"))
    prompts: tuple[str, ...] | None = option(None, "A prompt.", repeats=True)
    mode: Literal["swap", "recompute"] = option("swap", "Blocks go this way.")
    kernel: str = option("xla", "This one runs.", choices=("xla", "triton"))
    ends: bool | None = option(None, "An end token ends it.")
    name: str | None = option(None, "It is called this.")
    derived: int = 7  # no option


def parsed(*arguments: str) -> Config:
    values = flags.FlagValues()
    define(Config, values)
    assert values(["script", *arguments]) == ["script"]
    return from_flags(Config, values)


def test_without_flags_options_have_their_defaults():
    assert parsed() == Config()
    assert parsed().rates == (1.0, 2.0)


def test_flags_become_values_of_the_fields_types():
    config = parsed(
        *("--rounds=4", "--limit=1", "--rates=1, 2.5", "--sizes=8,16", "--systems=orca,paged"),
        *("--mode=recompute", "--kernel=triton", "--noends", "--name=x", "--seed=3"),
    )
    assert (config.rounds, config.limit, config.rates) == (4, 1.0, (1.0, 2.5))
    assert (config.sizes, config.systems) == ((8, 16), ("orca", "paged"))
    assert (config.mode, config.kernel) == ("recompute", "triton")
    assert (config.ends, config.name, config.seed) == (False, "x", 3)


def test_strings_that_repeat_may_hold_commas():
    assert parsed("--prompts=One, two?", "--prompts=Three?").prompts == ("One, two?", "Three?")


def test_quick_changes_what_was_not_given():
    assert parsed("--quick") == Config(quick=True, rounds=3, sizes=(16, 64))
    assert parsed("--quick", "--rounds=5", "--sizes=8").rounds == 5
    assert parsed("--quick", "--rounds=5", "--sizes=8").sizes == (8,)


@pytest.mark.parametrize(
    "wrong",
    ["--rounds=1", "--rounds=10", "--rounds=2.5", "--limit=-1", "--limit=x", "--mode=wait",
     "--kernel=cuda", "--seed=-1", "--ends=maybe", "--derived=8"],
)  # fmt: skip
def test_absl_refuses_a_value_out_of_bounds_or_of_another_type(wrong):
    with pytest.raises(flags.Error):
        parsed(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--rates=1,x", "--rates takes numbers of at least 0.5 and at most 8, got 'x'"),
        ("--rates=0.4", "--rates takes numbers of at least 0.5 and at most 8, got '0.4'"),
        ("--rates=1,8.5", "--rates takes numbers of at least 0.5 and at most 8, got '8.5'"),
        ("--rates=nan", "--rates takes numbers of at least 0.5 and at most 8, got 'nan'"),
        ("--rates=", "--rates takes one value at least, got none"),
        ("--sizes=16,2.5", "--sizes takes integers of at least 1, got '2.5'"),
        ("--systems=paged,vllm", "--systems takes paged, orca; got 'vllm'"),
    ],
)
def test_a_wrong_element_of_a_list_is_named(wrong, message):
    with pytest.raises(ValueError, match=r"^--") as error:
        parsed(wrong)
    assert str(error.value) == message


def test_help_says_what_an_option_does_what_it_takes_and_what_quick_makes_of_it():
    values = flags.FlagValues()
    define(Config, values)
    assert values["rounds"].help == "Rounds are this many. With --quick: 3."
    assert values["sizes"].help.startswith("Sizes are these. With --quick: 16,64.")
    assert values["systems"].help.startswith("<paged|orca>: These run.")
    assert values["mode"].help == "<swap|recompute>: Blocks go this way."
    assert values["seed"].help == "Seed of everything that is drawn at random."


def test_only_options_are_defined_and_each_once():
    values = flags.FlagValues()
    names = define(Config, values)
    assert "derived" not in names
    assert set(names) == set(as_dict(Config()))
    assert define(SimulationOptions, values) == ["quick", "seed", "out_dir", "processes"]


def test_a_class_adds_choices_to_a_field_that_it_inherits():
    @dataclass(frozen=True)
    class Base:
        policy: str = option("fcfs", "Requests go in this order.")

    class Named(Base):
        CHOICES = {"policy": ("fcfs", "priority")}  # noqa: RUF012

    values = flags.FlagValues()
    define(Named, values)
    values(["script", "--policy=priority"])
    assert from_flags(Named, values).policy == "priority"
    with pytest.raises(flags.Error, match="fcfs"):
        values(["script", "--policy=random"])


def test_a_type_that_no_flag_has_is_refused():
    @dataclass(frozen=True)
    class Wrong:
        sizes: dict[str, int] = option(None, "Sizes by name.")

    with pytest.raises(TypeError, match="the option sizes has a type without flags"):
        define(Wrong, flags.FlagValues())


def test_an_experiment_takes_options_of_the_engine_with_defaults_of_its_own():
    @dataclass(frozen=True, kw_only=True)
    class Served(Options):
        block_size: int = engine_option("block_size")
        max_num_seqs: int = engine_option("max_num_seqs", 8)

    values = flags.FlagValues()
    define(Served, values)
    assert (
        values["block_size"].help
        == EngineConfig.__dataclass_fields__["block_size"].metadata["text"]
    )
    assert "default" not in values["max_num_seqs"].help
    with pytest.raises(flags.Error):
        values(["script", "--max_num_seqs=0"])
    assert engine_options(Served(block_size=32)) == {"block_size": 32, "max_num_seqs": 8, "seed": 0}


def test_results_hold_all_options_of_all_classes():
    @dataclass(frozen=True)
    class Other:
        model: str = option("smollm2", "This model answers.")

    given = as_dict(Config(rounds=2), Other())
    assert given["rounds"] == 2
    assert given["model"] == "smollm2"
    assert "derived" not in given
