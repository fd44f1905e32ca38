"""Few-shot translation prompts: a shared prefix of a given length, then a sentence of one's own."""

from collections.abc import Callable, Sequence

import numpy as np

Encode = Callable[[str], Sequence[int]]

INSTRUCTION = "Translate the following English sentences into German.\n\n"
EXAMPLES = (
    (
        "She said that the results were encouraging, but that it was far too early to speak of a "
        "breakthrough.",
        "Sie sagte, die Ergebnisse seien ermutigend, doch sei es viel zu früh, um von einem "
        "Durchbruch zu sprechen.",
    ),
    (
        "The new committee will present its report on the future of the railways in the north "
        "before the summer break.",
        "Der neue Ausschuss wird seinen Bericht über die Zukunft der Eisenbahn im Norden noch vor "
        "der Sommerpause vorlegen.",
    ),
    (
        "In the old town, where the market is held every Saturday, most of the houses date back to "
        "the seventeenth century.",
        "In der Altstadt, wo jeden Samstag der Markt stattfindet, stammen die meisten Häuser aus "
        "dem siebzehnten Jahrhundert.",
    ),
    (
        "If the weather stays dry, the harvest will begin two weeks earlier than it did last year.",
        "Wenn das Wetter trocken bleibt, beginnt die Ernte zwei Wochen früher als im vergangenen "
        "Jahr.",
    ),
    (
        "The museum has closed two of its halls, because the roof has to be repaired before the "
        "winter.",
        "Das Museum hat zwei seiner Säle geschlossen, weil das Dach vor dem Winter ausgebessert "
        "werden muss.",
    ),
)
SENTENCES = (
    "The new bridge will be opened to traffic in the spring.",
    "Nobody in the village could remember a colder winter.",
    "The minister declined to answer questions about the budget.",
    "Prices for bread and milk have risen again this month.",
    "Two hikers were rescued from the mountain on Sunday evening.",
    "The orchestra will play three concerts in the city hall.",
    "Scientists have found traces of the plant in very old ice.",
    "The train to the coast was delayed by more than an hour.",
    "Many young families are moving back to the countryside.",
    "The court will announce its decision at the end of the week.",
    "He learned to repair clocks from his grandmother.",
    "The factory employs more people today than it did in the past.",
    "A heavy storm damaged several roofs near the harbour.",
    "The library stays open until ten o'clock in the evening.",
    "Farmers hope for rain before the beginning of the harvest.",
    "The team won its third match in a row without conceding a goal.",
)


def prefix_tokens(encode: Encode, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of an instruction and worked examples, as often as needed.

    With SmolLM2's tokenizer, 80 tokens are the instruction and one example, 341 are all five.
    """
    examples = "".join(f"English: {english}\nGerman: {german}\n\n" for english, german in EXAMPLES)
    text = INSTRUCTION + examples
    while len(tokens := list(encode(text))) < num_tokens:
        text += examples
    return tokens[:num_tokens]


def questions(encode: Encode, count: int, *, seed: int) -> list[list[int]]:
    """Prompts to append to the prefix: two sentences to be translated, of random choice."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(len(SENTENCES), size=2, replace=False) for _ in range(count)]
    return [list(encode(f"English: {SENTENCES[a]} {SENTENCES[b]}\nGerman:")) for a, b in chosen]
