"""Labels by the widths of tokens are those by the tokenizer's offsets, whatever the tokenizer does to a text."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
from data_fixtures import plain_tokenizer
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from toolkit.data.encoding.labelling import Labeller
from toolkit.data.rows import IGNORE

PIECES = [
    *("The quick brown fox", " jumps", "  over ", "\n\n", "\t", "1234", "<|im_start|>", "<|im_end|>", "<wide>"),
    *("é", "e\u0301", "\u1112\u1161\u11ab", "ﬁ", "😀👍🏽", "漢字", "\u00a0", "ß", "ÅÅ", "", "'s"),
]


def unchanged(tokenizer: Tokenizer) -> None:
    pass


def nfc(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def nfkc(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFKC()


def trimmed(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)


def untrimmed(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)


def prefixed(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def digits(tokenizer: Tokenizer) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])


def dropping(tokenizer: Tokenizer) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\t", "removed"), level])


def swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<wide>", rstrip=True, lstrip=True)])


def words(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


KINDS: dict[Callable[[Tokenizer], None], bool] = {
    unchanged: True, nfc: True, nfkc: False, trimmed: False, untrimmed: True, prefixed: False, digits: True,
    dropping: True, swallowing: True, words: False,
}  # fmt: skip
"""What is done to a byte-level tokenizer, and whether its tokens may spell a text byte by byte then."""


@pytest.mark.parametrize("change", KINDS)
def test_labels_by_widths_are_those_by_offsets(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = plain_tokenizer()
    change(tokenizer.backend_tokenizer)
    quick, slow = Labeller(tokenizer), Labeller(tokenizer)
    assert (quick._widths is not None) is KINDS[change]
    slow._widths = None
    draw = random.Random(0)
    merged = 0
    for _ in range(2000):
        text = "".join(draw.choices(PIECES, k=draw.randrange(12)))
        edges = sorted(draw.sample(range(len(text) + 1), min(2 * draw.randrange(4), (len(text) + 1) // 2 * 2)))
        ranges = list(zip(edges[::2], edges[1::2], strict=True))
        made = quick(text, ranges)
        assert made == slow(text, ranges), (text, ranges)
        merged += made[2]
    assert merged > 100


def test_most_texts_are_labelled_by_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the data path's figures rest on; gaps in what is trained need the tokenizer's own places."""
    labeller, asked = Labeller(plain_tokenizer()), []
    ask = Labeller._with_offsets
    monkeypatch.setattr(Labeller, "_with_offsets", lambda self, text: [asked.append(text), ask(self, text)][1])
    for text in ("The quick fox", "naïve 😀 <|im_end|>\n", ""):
        ids, labels, _ = labeller(text, [(0, len(text))])
        assert labels == [IGNORE, *ids[1:]][: len(ids)] and asked == []
    ids, labels, _ = labeller("The quick fox", [(0, 13)], [(4, 9)])
    assert asked == ["The quick fox"] and labels[-1] == ids[-1] and labels.count(IGNORE) > 1


def test_a_labeller_is_pickled_to_other_processes() -> None:
    labeller = Labeller(plain_tokenizer())
    copy = pickle.loads(pickle.dumps(labeller))
    assert copy("The quick fox", [(4, 13)]) == labeller("The quick fox", [(4, 13)])


def test_a_tokenizer_with_a_way_of_its_own_is_asked_as_it_is() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text: str, **settings: object) -> object:
            return super()._encode_plus(text.replace("fox", "dog"), **settings)

    tokenizer = Own(tokenizer_object=plain_tokenizer().backend_tokenizer)
    ids, _, _ = Labeller(tokenizer)("a fox", [])
    assert tokenizer.decode(ids) == "a dog"
