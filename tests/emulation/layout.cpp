// Writes how the headers of the kernels lay things out, for the host to compare with what it has.
//
// First a line "name value" for each constant, and "struct field offset size" for each field. Then,
// for each line on standard input, a number. "lane" size lines packs chunk, and "mail" size letter
// letters slot slots tracks: bytes of a lane, and of a mail area. "chunk" tracks bytes slot 0: bytes of
// a chunk.
#include <cstddef>
#include <iostream>
#include <string>

#include "runtime.h"

#include "mail.cuh"
#include "wait.cuh"

using namespace cupy_zc;

#define CONSTANT(name) std::cout << #name << ' ' << +(name) << '\n'
#define SIZE(type) std::cout << #type << ' ' << sizeof(type) << '\n'
#define FIELD(type, field)                                                         \
    std::cout << #type << ' ' << #field << ' ' << offsetof(type, field) << ' ' \
              << sizeof(type::field) << '\n'

namespace {

void constants() {
    CONSTANT(MAX_RANKS);
    CONSTANT(EVERY_RANK);
    CONSTANT(STAGED);
    CONSTANT(CODE_TIMEOUT);
    CONSTANT(CODE_MISMATCH);
    CONSTANT(WORD_BYTES);
    CONSTANT(LINE_DATA);
    CONSTANT(STATE);
    CONSTANT(SHARE_BITS);
    CONSTANT(MAX_TRACKS);
    const Args args = {};  // a lane at address 0
    std::cout << "FAILURE " << reinterpret_cast<u64>(failure_of(args)) << '\n';
}

void arguments() {
    SIZE(Args);
    FIELD(Args, input);
    FIELD(Args, output);
    FIELD(Args, input_location);
    FIELD(Args, output_location);
    FIELD(Args, count);
    FIELD(Args, fingerprint);
    FIELD(Args, windows);
    FIELD(Args, error);
    FIELD(Args, lane);
    FIELD(Args, budget);
    FIELD(Args, ll128_lines);
    FIELD(Args, ll_packs);
    FIELD(Args, chunk);
    FIELD(Args, scratch);
    FIELD(Args, lanes);
    FIELD(Args, rank);
    FIELD(Args, size);
    FIELD(Args, arenas);
    FIELD(Args, root);
    FIELD(Args, element);
    FIELD(Args, two_step);
}

void record_fields() {
    SIZE(ErrorRecord);
    FIELD(ErrorRecord, code);
    FIELD(ErrorRecord, rank);
    FIELD(ErrorRecord, lane);
    FIELD(ErrorRecord, epoch);
    FIELD(ErrorRecord, detail);
    FIELD(ErrorRecord, mine);
    FIELD(ErrorRecord, abort);
}

void mail_arguments() {
    SIZE(MailPart);
    FIELD(MailPart, array);
    FIELD(MailPart, bytes);
    FIELD(MailPart, fingerprint);
    FIELD(MailPart, area);
    FIELD(MailPart, peer);
    FIELD(MailPart, blocks);
    FIELD(MailPart, chunk);
    SIZE(MailArgs);
    FIELD(MailArgs, push);
    FIELD(MailArgs, drain);
    FIELD(MailArgs, area);
    FIELD(MailArgs, error);
    FIELD(MailArgs, lane);
    FIELD(MailArgs, budget);
    FIELD(MailArgs, letter);
    FIELD(MailArgs, slot);
    FIELD(MailArgs, letters);
    FIELD(MailArgs, slots);
    FIELD(MailArgs, tracks);
    FIELD(MailArgs, rank);
}

}  // namespace

int main() {
    constants();
    arguments();
    record_fields();
    mail_arguments();
    std::string what;
    u32 size;
    while (std::cin >> what >> size) {
        u64 a, b, c, d, e;
        std::cin >> a >> b >> c;
        if (what == "lane") {
            std::cout << lane_bytes(size, a, b) + c << '\n';
        } else if (what == "mail") {
            std::cin >> d >> e;
            std::cout << mail_bytes(size, a, b, c, d, e) << '\n';
        } else {
            std::cout << chunk_of(a, size, b) << '\n';
        }
    }
}
