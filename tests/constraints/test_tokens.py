"""Allowed tokens and bad words, against plain sets and the rule itself."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.constraints.tokens import AllowedTokens, BadWords, bits_of, spell_words
from paged_jax.loading import build_byte_tokenizer, load_tokenizer
from tests.constraints.small_vocabulary import VOCAB_SIZE, allowed, constraint

ALL = set(range(VOCAB_SIZE))


@given(st.integers(1, 100), st.sets(st.integers(0, 120)))
def test_token_t_is_bit_t_mod_32_of_word_t_div_32(vocab_size, tokens):
    bits = bits_of(tokens, vocab_size)
    assert bits.dtype == np.uint32
    found = {t for t in range(32 * len(bits)) if bits[t // 32] >> np.uint32(t % 32) & 1}
    assert found == {t for t in tokens if t < vocab_size}


@given(st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1), st.lists(st.integers(0, 5)))
def test_only_allowed_tokens_are_left_whatever_came_before(tokens, output):
    assert allowed(AllowedTokens(tokens, VOCAB_SIZE), output) == tokens


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_a_bad_word_is_never_completed(words, output):
    wanted = {t for t in ALL if not any([*output, t][-len(word) :] == word for word in words)}
    assert allowed(BadWords(words), output) == wanted


def test_a_bad_word_is_left_out_of_all_outputs_and_nothing_else_is():
    bad = [[0, 1], [2]]
    rule = BadWords(bad)
    reached = {()}
    for _ in range(4):
        reached |= {
            (*output, token) for output in reached for token in allowed(rule, output) if token < 3
        }
    for output in itertools.chain.from_iterable(
        itertools.product(range(3), repeat=n) for n in range(5)
    ):
        holds_bad = 2 in output or any(pair == (0, 1) for pair in itertools.pairwise(output))
        assert (output in reached) == (not holds_bad)


def test_bad_words_are_spelt_at_the_beginning_and_after_a_space():
    smollm2 = load_tokenizer("smollm2")

    def spelt(*words):
        return [smollm2.convert_ids_to_tokens(ids) for ids in spell_words(words, smollm2, 49152)]

    assert spelt("cat") == [["cat"], ["Ġcat"]]
    assert spelt(" cat") == spelt("cat"), "a space before the word changes nothing"
    # Of other lengths: the space is a token of its own, or the word is cut in another way.
    assert spelt("7") == [["7"]]
    assert all("".join(tokens).lstrip("Ġ") == "supercali" for tokens in spelt("supercali"))
    assert spelt("\n") == [["Ċ"], ["ĠĊ"]], "white space alone is a word"
    bytes_tokenizer = build_byte_tokenizer()
    assert spell_words(["no"], bytes_tokenizer, 259) == [[110, 111]]


def test_a_word_that_the_model_cannot_spell_is_refused():
    with pytest.raises(ValueError, match="bad_words: the model has no tokens for 'é'"):
        spell_words(["é"], build_byte_tokenizer(), 150)
    with pytest.raises(ValueError, match=r"bad_words: 'a\\ud800' is not valid Unicode"):
        spell_words(["a\ud800"], build_byte_tokenizer(), 259)


def test_several_constraints_hold_together():
    both = constraint(allowed_token_ids=[0, 1, 2], bad_words=["ab", "b"])
    assert allowed(both, []) == {0, 2}
    assert allowed(both.branch(), []) == {0, 2}
    three = constraint(
        allowed_token_ids=[0, 3, 6], bad_words="ab", structured_outputs={"regex": "(ab|a)?"}
    )
    assert allowed(three, []) == {0, 6}
    assert allowed(three, [0]) == {6}


def test_nothing_asked_for_is_no_constraint():
    assert constraint(temperature=0, stop="x", logit_bias={1: 1}) is None
