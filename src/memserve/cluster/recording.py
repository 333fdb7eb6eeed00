"""How a machine that remembers tells what its trees have learned (level 2, row C1)."""

from __future__ import annotations

from memserve.cluster.registry import Member
from memserve.cluster.trees import Trees
from memserve.messages import KvEvents, KvSnapshot
from memserve.metadata import EntriesChanged, EntriesReplaced


def entries_record(
    member: Member, news: KvEvents | KvSnapshot, trees: Trees, known: int, now: int
) -> EntriesChanged | EntriesReplaced:
    """What ``news`` has changed, now that it is applied; before, changes up to ``known`` were.

    Mostly that is the news itself. Where it has closed a gap, and changes that waited behind it were applied as well,
    it is everything that the member has.
    """
    next_event = trees.feed(member.number).next_event
    if isinstance(news, KvEvents) and news.first <= known and next_event <= news.first + len(news.changes):
        return EntriesChanged(member.peer, news.first, news.changes, now)
    if isinstance(news, KvSnapshot) and next_event == news.next_event:
        return EntriesReplaced(member.peer, next_event, news.hbm, news.dram, now)
    return EntriesReplaced(member.peer, next_event, *trees.holdings(member.number), now)
