// What the host does while kernels run: after a while it says that a rank cannot come any more.
#pragma once

#include "runtime.h"
#include "types.cuh"

// One thread beside those of the kernels, which writes to the records of all ranks.
class Host {
   public:
    // `lost` as in ErrorRecord::abort; 0: the host says nothing. Times are those of the clock.
    Host(std::vector<cupy_zc::ErrorRecord>& records, uint64_t lost, uint64_t after)
        : records_(records), lost_(lost), after_(after), body_([this] { tell(); }) {
        if (after == 0) {
            tell();
        }
    }
    Host(const Host&) = delete;

    // To be called when all other threads are there.
    void join(std::vector<emulation::Fiber>& fibers) const {
        if (lost_ == 0 || after_ == 0) {
            return;
        }
        const unsigned behind = fibers.back().team + 1;
        fibers.emplace_back();
        fibers.back().team = behind;
        fibers.back().body = &body_;
    }

   private:
    void tell() const {
        const uint64_t start = emulation::now();
        while (emulation::now() - start < after_) {
            emulation::yield();
        }
        for (cupy_zc::ErrorRecord& record : records_) {
            __atomic_store_n(&record.abort, lost_, __ATOMIC_RELAXED);
        }
    }

    std::vector<cupy_zc::ErrorRecord>& records_;
    const uint64_t lost_, after_;
    const std::function<void()> body_;
};
