// What must hold between any two calls.
#include <algorithm>

#include "errors.h"
#include "store/segment_log.h"

namespace memserve::store {

void SegmentLog::check_invariants() const {
  index_.check_invariants();
  std::vector<uint32_t> pending(segments_.size()), listed(segments_.size());
  for (const auto& [id, ticket] : pending_) {
    check(segments_[ticket.segment].serial == ticket.serial, "a ticket outlived its segment");
    ++pending[ticket.segment];
  }
  std::vector<uint32_t> moves(segments_.size());
  for (const auto& [id, step] : steps_) {
    if (step.kind == Step::Kind::page) ++pending[step.segment];
    if (step.kind == Step::Kind::move) ++moves[step.segment];
  }
  const auto count = [&](uint32_t number, State state, const char* message) {
    ++listed[number];
    check(segments_[number].state == state, message);
  };
  for (const uint32_t number : free_) count(number, State::free, "a segment of the free list is not free");
  for (const uint32_t number : ready_) count(number, State::ready, "a segment that is not ready would be opened");
  for (const uint32_t number : closing_) count(number, State::closing, "a segment without a footer is not closing");
  for (const auto& [serial, number] : sealed_) {
    count(number, State::sealed, "a segment of the order of eviction is not sealed");
    check(segments_[number].serial == serial, "a sealed segment stands at another one's place");
  }
  if (open_) count(*open_, State::open, "the open segment is not open");
  if (reopening_) count(*reopening_, State::reopening, "the segment that is reopened is in another state");
  if (emptying_) count(*emptying_, State::emptying, "the segment that is emptied is in another state");
  const auto outdated = std::count_if(segments_.begin(), segments_.end(), [](const Segment& one) { return one.outdated; });
  check(outdated == outdated_, "emptied segments are counted wrongly");
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    check(segment.pending == pending[number], "a segment counts its tickets wrongly");
    check(segment.moves == moves[number], "a segment counts its moves wrongly");
    if (!segment.stale && segment.state != State::preparing) check(listed[number] == 1, "a segment is lost");
    check(segment.pages_used + (segment.footer.empty() ? 0 : footer_pages(segment.footer.size())) <= segment_pages(),
          "a segment has no room for its footer");
  }
  index_.each([&](const Entry& entry) {
    const Segment& segment = segments_[entry.segment];
    const bool holds = segment.state == State::open || segment.state == State::closing ||
                       segment.state == State::sealed || segment.state == State::emptying ||
                       segment.state == State::reopening;
    check(holds && !segment.stale, "a record is found in a segment that may be written again");
    check(entry.page + record_pages(entry.length, entry.name_bytes, entry.units) <= segment_pages(), "a record leaves its segment");
  });
}

}  // namespace memserve::store
