"""Texts of the TTFT benchmark: role prompts of an exact length, tasks, and the glue between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_AGENTS = 5

_ROLES = (
    "You plan long reports for the harbour authority of a northern port. Ships arrive with timber,"
    " grain and machine parts, and every department writes in its own way. You gather what is"
    " known, decide what the reader must learn first, and lay out the argument before anybody"
    " polishes a sentence. Name the quay, the month and the cause whenever you can. Treat tides,"
    " ice and customs as parts of one story. Where the figures are uncertain, describe the range"
    " and tell the reader which measurement would settle it. Keep officials and dock workers"
    " equally in mind, because both will act on what you write.",
    "As an auditor of technical documents you look for gaps that could cost money. Your clients"
    " build bridges, pumping stations and tunnels, and they expect objections early rather than"
    " apologies late. Compare each statement with common engineering practice, ask who measured"
    " it and when, and follow every assumption to the place where it would break. A remark of"
    " yours always has three parts: the sentence it concerns, the risk behind it, and the cheapest"
    " check that would remove the risk. You write calmly, you never guess at motives, and you"
    " would rather ask one precise question than raise five vague doubts.",
    "Your task is that of an economist in a regional development bank. Farmers, hotel owners and"
    " small factories ask for loans, and the board wants to know what a project changes for the"
    " valley as a whole. Translate plans into costs, wages, prices and years. Separate money that"
    " is newly earned from money that only moves from one pocket to another. Explain interest and"
    " inflation in words that a mayor can repeat. Mention the people who would lose by the plan,"
    " since they will speak at the hearing. When two forecasts disagree, show the assumption on"
    " which they part and say which of them you find likelier.",
    "Imagine a museum educator who turns heavy studies into evenings for families. Children of"
    " nine, students and grandparents sit in the same room, and nobody may be bored or lost. You"
    " pick one object to hold in the hand, one surprise and one question that stays open. Difficult"
    " words appear only after the thing itself has been seen. You love maps, smells and sounds,"
    " and you know that a good comparison is worth a page of definitions. Never talk down to"
    " anyone, never invent a source, and leave out whatever does not help the evening. Close with"
    " something the visitors can try at home in their kitchen.",
    "The chief of staff of a city mayor reads everything last and signs nothing that is unclear."
    " You receive drafts, objections, calculations and talks, and you turn them into a decision"
    " paper. It states what shall be done, who does it, until when and with which money, followed"
    " by the two best arguments on the other side. Contradictions between the drafts are settled"
    " in the open, with a reason. You keep promises small and dates firm. Journalists will quote"
    " single sentences from the paper, so each of them must be able to stand alone without"
    " misleading anybody who has not seen the rest.",
)

_SUBJECTS = (
    "how a port could unload ships at night without waking the town",
    "what such a plan leaves open and where it could fail",
    "what the plan would cost and bring over ten years",
    "how the matter could be explained to families on a museum evening",
    "which decision the city should take and how it should begin",
)

# Short words that most vocabularies hold as one token each, to fill a prompt up exactly.
_FILLERS = (" and", " so", " it", " to", " the", " a", ".", " 1", "!", ",")


def exact_role(index: int, num_tokens: int, count: Callable[[str], int]) -> str:
    """The role prompt of agent `index` (0 is the first): `num_tokens` tokens by `count`.

    Raises:
        ValueError: no text of exactly that length was found.
    """
    words = _ROLES[index].split()
    # A word is at least one token, so this many words are at least that many tokens.
    words = words * (num_tokens // len(words) + 1)
    low, high = 1, len(words)  # count(low words) <= num_tokens < count(high words + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if count(" ".join(words[:middle])) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    text = " ".join(words[:low])
    while (num_missing := num_tokens - count(text)) > 0:
        longer = (text + filler for filler in _FILLERS)
        text = next((t for t in longer if 0 <= num_tokens - count(t) < num_missing), "")
        if not text:
            raise ValueError(f"no role prompt of exactly {num_tokens} tokens for agent {index + 1}")
    return text


def task(index: int, nonce: str, outputs: Sequence[str]) -> str:
    """The user message of agent `index`: the nonce line, the earlier outputs, the task."""
    parts = [nonce]
    for number, output in enumerate(outputs, start=1):
        parts.append(f"Colleague {number} of the team wrote this:\n\n{output}")
    parts.append(
        f"Now it is your turn. Write in detail, in at least eight long paragraphs, about"
        f" {_SUBJECTS[index]}."
    )
    return "\n\n".join(parts)
