// The network between hosts of tests: a switch over TAP devices that delays, loses and paces what passes.
//
//   wire DELAY_US LOSS_PER_MILLION BITS_PER_SECOND SEED FD...
//
// FD are opened TAP devices, one for each host. Lines on stdin: "cut A B" (what A sends to B is lost), "heal A B"; A and
// B are places in the list of FD. Each line is answered with "ok". The process ends with its stdin.

#include <poll.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace {

using Mac = std::array<std::uint8_t, 6>;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kFrameMax = 65536;
constexpr std::size_t kQueuedMax = 4 << 20;  // bytes that wait for their turn on one line: more are lost
constexpr int kFramesATurn = 64;

struct Frame {
    std::int64_t due_ns;
    std::vector<std::uint8_t> bytes;
};

struct Line {  // to one host
    int fd;
    std::int64_t free_ns = 0;  // when the last frame has left
    std::size_t queued = 0;
    std::deque<Frame> frames;
};

std::int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

class Wire {
public:
    Wire(std::int64_t delay_ns, double loss, double bits_per_ns, unsigned seed, const std::vector<int>& fds)
        : delay_ns_(delay_ns), loss_(loss), bits_per_ns_(bits_per_ns), random_(seed) {
        for (int fd : fds) lines_.push_back(Line{fd, 0, 0, {}});
    }

    void run() {
        std::vector<pollfd> polled{{0, POLLIN, 0}};
        for (const Line& line : lines_) polled.push_back({line.fd, POLLIN, 0});
        while (true) {
            const std::int64_t wait_ns = deliver();
            timespec timeout{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
            if (ppoll(polled.data(), polled.size(), wait_ns < 0 ? nullptr : &timeout, nullptr) <= 0) continue;
            if (polled[0].revents && !obey()) return;
            for (std::size_t at = 0; at < lines_.size(); ++at)
                if (polled[at + 1].revents) read_from(at);
        }
    }

private:
    // Hands over what is due; returns how long nothing else will be, -1: nothing waits.
    std::int64_t deliver() {
        std::int64_t next = -1;
        const std::int64_t now = now_ns();
        for (Line& line : lines_) {
            while (!line.frames.empty() && line.frames.front().due_ns <= now) {
                const Frame& frame = line.frames.front();
                if (write(line.fd, frame.bytes.data(), frame.bytes.size()) < 0) {}  // the host is gone
                line.queued -= frame.bytes.size();
                line.frames.pop_front();
            }
            if (line.frames.empty()) continue;
            const std::int64_t left = line.frames.front().due_ns - now;
            if (next < 0 || left < next) next = left;
        }
        return next;
    }

    void read_from(std::size_t at) {
        std::uint8_t buffer[kFrameMax];
        for (int turn = 0; turn < kFramesATurn; ++turn) {
            const ssize_t size = read(lines_[at].fd, buffer, sizeof buffer);
            if (size < 14) return;
            Mac to, from;
            std::memcpy(to.data(), buffer, 6);
            std::memcpy(from.data(), buffer + 6, 6);
            places_[from] = at;
            const auto known = places_.find(to);
            for (std::size_t other = 0; other < lines_.size(); ++other)
                if (other != at && (known == places_.end() || known->second == other)) send(at, other, buffer, size);
        }
    }

    void send(std::size_t from, std::size_t to, const std::uint8_t* bytes, std::size_t size) {
        Line& line = lines_[to];
        if (cut_.count({from, to}) || line.queued + size > kQueuedMax || chance_(random_) < loss_) return;
        const std::int64_t now = now_ns();
        line.free_ns = std::max(now, line.free_ns) + static_cast<std::int64_t>(8.0 * double(size) / bits_per_ns_);
        line.frames.push_back({line.free_ns + delay_ns_, {bytes, bytes + size}});
        line.queued += size;
    }

    bool obey() {
        char words[128], what[16];
        std::size_t from, to;
        if (std::fgets(words, sizeof words, stdin) == nullptr) return false;
        if (std::sscanf(words, "%15s %zu %zu", what, &from, &to) != 3) return false;
        if (std::strcmp(what, "cut") == 0) cut_.insert({from, to});
        else cut_.erase({from, to});
        std::puts("ok");
        std::fflush(stdout);
        return true;
    }

    std::int64_t delay_ns_;
    double loss_, bits_per_ns_;
    std::mt19937 random_;
    std::uniform_real_distribution<double> chance_{0.0, 1.0};
    std::vector<Line> lines_;
    std::map<Mac, std::size_t> places_;
    std::set<std::pair<std::size_t, std::size_t>> cut_;
};

}  // namespace

int main(int count, char** words) {
    if (count < 6) return 2;
    setvbuf(stdin, nullptr, _IONBF, 0);
    std::vector<int> fds;
    for (int at = 5; at < count; ++at) fds.push_back(std::atoi(words[at]));
    Wire(std::atoll(words[1]) * 1000, std::atof(words[2]) / 1e6, std::atof(words[3]) / 1e9,
         static_cast<unsigned>(std::atoi(words[4])), fds)
        .run();
    return 0;
}
