/* Low-latency buffers, double by the parity of the epoch: cuda/lines.cuh, line_routes.cuh, ll128.cu,
 * ll128_move.cu, ll128_reduce.cu (lines of 128 bytes), and packets.cuh, ll.cu (packets).
 *
 * What is where in the kernels
 *   words          the ring of announce(), here always <false>: nobody waits for it but ll.cu
 *   data, flag     Lines::place(): the 120 bytes and the last 8. What the link must keep: no part of
 *                  a line arrives after its flag. Nothing else is ordered, all is relaxed
 *   data2, flag2   lines `slice + line` of two_steps() in ll128.cu: results
 *   packet         packets_of() in ll.cu: each 8 bytes of data with their own flag, so one place
 *   choose         which call the program makes next, the same on all ranks, unless one strays:
 *     ALL          one_step(), all_gather, all_to_all, reduce_scatter: data between all
 *     TWO          two_steps()
 *     PACKETS      ll.cu: packets are sent, then agree(), then packets are read
 *     TWIN         ll.cu with another count: only for a rank that strays
 *     FROM + root  Route<false, true>: data from the root, empty lines between all others
 *     TO + root    Route<true, false>: data to the root, empty lines between all others
 *                  Of these ALL and the last two, or with -DSTEPS ALL and TWO, or with -DPACKED ALL
 *                  and PACKETS
 * One line a block and one block a rank: block b hears from blocks b alone. All cells hold the number
 * of the call that wrote them: KIND knows what that rank called then, the fingerprint in the kernels.
 *
 * Properties (assertions, and no state without a way on but that of a failed lane)
 *   the data read are those of this call; nothing is written while a rank calls something else, and
 *   then every rank fails; no wait is for ever
 * A flag repeats after 2^40 calls, that of a packet after 2^32 - 1, here after EPOCHS: a place that was
 * last written exactly so many calls ago looks new. The kernels have that limit; the program here
 * leaves no place alone for so long (`idle`).
 *
 * Taken away by -D: NO_EMPTY (lines), ONE_BUFFER, NO_EPOCH, NO_FINGERPRINT (in flags), SPLIT_LINES
 * (what the link keeps), EARLY_LOADS (a line loaded before its flag came), NO_WATCH, NO_AGREE (of
 * ll.cu), NO_PACKET_FLAG.
 */
#if defined(STEPS) || defined(PACKED)
#define EPOCHS 8
#else
#define EPOCHS 6  /* a word that nobody waits for may be late when the next but one is written */
#endif
#include "memory.pml"
#define ALL 1
#define TWO 2
#define PACKETS 3
#define TWIN 10
#define FROM 4
#define TO 7
#define LINES_OF(kind) (kind != PACKETS)
#define OTHERS_OF(kind) (kind == TWO || kind == PACKETS)

Cell words[N * 2 * N], data[N * 2 * N], flag[N * 2 * N], data2[N * 2 * N], flag2[N * 2 * N];
Cell packet[N * 2 * N];
byte chosen[GHOST + 1];                      /* the program */
byte comers[GHOST + 1], leavers[GHOST + 1];  /* how many ranks began and ended a call */
byte strayed, strayer, strayed_to;           /* the call in which a rank called something else */
byte idle[2], idle_others[2];  /* how often a program did without lines; without the other places */

#define RING(at, from) (((at) * 2 + call % 2) * N + (from))
#ifdef ONE_BUFFER
#define PLACE(at, from) (((at) * 2) * N + (from))
#else
#define PLACE(at, from) RING(at, from)
#endif

#define IS_OF(mark) ((mark) % EPOCHS == call % EPOCHS)
#define KIND(mark, from) (strayed == (mark) && strayer == (from) -> strayed_to : chosen[mark])

/* What a peer announced; an older word that looks like one of this call strays as well. */
#define STRAYS1_(word) (IS_OF(word) && KIND(word, PEER1(rank)) != kind)
#define STRAYS2_(word) (IS_OF(word) && KIND(word, PEER2(rank)) != kind)
#define ANY_STRAYS \
    (ARRIVES(words[RING(rank, PEER1(rank))], STRAYS1_) || \
     (N > 2 && ARRIVES(words[RING(rank, PEER2(rank))], STRAYS2_)))
#define ANNOUNCED(peer) ARRIVES(words[RING(rank, peer)], IS_OF)

/* A flag; an older one that looks like one of this call is taken for it. */
#if defined(NO_EPOCH)
#define FLAGGED(mark, from) (mark != 0)
#elif defined(NO_FINGERPRINT)
#define FLAGGED(mark, from) IS_OF(mark)
#else
#define FLAGGED(mark, from) (IS_OF(mark) && ((mark) != call || KIND(mark, from) == kind))
#endif
#define FLAGGED1(mark) FLAGGED(mark, PEER1(rank))
#define FLAGGED2(mark) FLAGGED(mark, PEER2(rank))
#ifdef NO_PACKET_FLAG
#define PACKED_(mark) (mark != 0)
#else
#define PACKED_(mark) IS_OF(mark)
#endif

/* Route::targets and ::sources: does data go from one to the other? */
#define HAS_DATA(from, to) \
    (kind < FROM || kind - FROM == (from) || kind - TO == (to))

inline any_kind() {
    if
    :: kind = ALL
#if defined(STEPS)
    :: kind = TWO
#elif defined(PACKED)
    :: kind = PACKETS
#else
    :: kind = FROM
    :: kind = FROM + 1
    :: N > 2 -> kind = FROM + 2
    :: kind = TO
    :: kind = TO + 1
    :: N > 2 -> kind = TO + 2
#endif
    fi
}

inline choose() {
    if
    :: chosen[call] -> kind = chosen[call]
    :: !chosen[call] ->
        any_kind();
#ifdef STEPS
        if :: idle_others[call % 2] == 2 -> kind = TWO :: else fi;
#endif
#ifdef PACKED
        if
        :: idle_others[call % 2] == 2 -> kind = PACKETS
        :: idle[call % 2] == 2 -> kind = ALL
        :: else
        fi;
#endif
#if defined(STEPS) || defined(PACKED)
        idle[call % 2] = (LINES_OF(kind) -> 0 : idle[call % 2] + 1);
        idle_others[call % 2] = (OTHERS_OF(kind) -> 0 : idle_others[call % 2] + 1);
#endif
        chosen[call] = kind
    fi;
    if
    :: true
    :: !strayed ->
#ifdef PACKED
        if :: any_kind() :: kind = TWIN fi;
#else
        any_kind();
#endif
        if
        :: kind != chosen[call] -> strayed = call; strayer = rank; strayed_to = kind
        :: else
        fi
    fi;
    comers[call]++
}

inline send(peer) {
    STORE(words[RING(peer, rank)], call);
    if
    :: kind == PACKETS || kind == TWIN -> STORE(packet[PLACE(peer, rank)], call)
#ifdef NO_EMPTY
    :: kind != PACKETS && !HAS_DATA(rank, peer)
#endif
    :: else ->
        STORE(data[PLACE(peer, rank)], call);
        STORE(flag[PLACE(peer, rank)], call)
    fi
}

inline send2(peer) {
    STORE(data2[PLACE(peer, rank)], call);
    STORE(flag2[PLACE(peer, rank)], call)
}

#ifdef NO_EMPTY
#define SILENT(peer) (!HAS_DATA(peer, rank))
#else
#define SILENT(peer) false
#endif
#define HEARD1 (SILENT(PEER1(rank)) || ARRIVES(flag[PLACE(rank, PEER1(rank))], FLAGGED1))
#define HEARD2 (SILENT(PEER2(rank)) || ARRIVES(flag[PLACE(rank, PEER2(rank))], FLAGGED2))
#define RESULT1 ARRIVES(flag2[PLACE(rank, PEER1(rank))], FLAGGED1)
#define RESULT2 ARRIVES(flag2[PLACE(rank, PEER2(rank))], FLAGGED2)

#ifdef SPLIT_LINES
#define WHOLE(line) skip
#else
#define WHOLE(line) SEE(line)  /* the link: no part of a line arrives after its flag */
#endif
#define ACCEPT_LINE(line, its_flag, test) \
    if \
    :: !(test(its_flag.seen)) && ARRIVES(its_flag, test) -> SEE(its_flag); WHOLE(line) \
    :: else \
    fi

/* A wait of a Watch: it ends where it is satisfied, or where a peer announced another call. */
inline wait_for_lines() {
    if
    :: d_step { HEARD1 && (N < 3 || HEARD2) ->
        ACCEPT_LINE(data[PLACE(rank, PEER1(rank))], flag[PLACE(rank, PEER1(rank))], FLAGGED1);
        if
        :: N > 2 ->
            ACCEPT_LINE(data[PLACE(rank, PEER2(rank))], flag[PLACE(rank, PEER2(rank))], FLAGGED2)
        :: else
        fi
    }
#ifndef NO_WATCH
    :: ANY_STRAYS -> goto failed
#endif
    fi
}

inline wait_for_results() {
    if
    :: d_step { RESULT1 && (N < 3 || RESULT2) ->
        ACCEPT_LINE(data2[PLACE(rank, PEER1(rank))], flag2[PLACE(rank, PEER1(rank))], FLAGGED1);
        if
        :: N > 2 ->
            ACCEPT_LINE(data2[PLACE(rank, PEER2(rank))], flag2[PLACE(rank, PEER2(rank))], FLAGGED2)
        :: else
        fi
    }
#ifndef NO_WATCH
    :: ANY_STRAYS -> goto failed
#endif
    fi
}

/* agree() of ll.cu: compares the words of all peers, where all are there or one differs. */
inline agree() {
    if
    :: d_step { EVERY_PEER(ANNOUNCED) && !ANY_STRAYS ->
        ACCEPT(words[RING(rank, PEER1(rank))], IS_OF);
        if :: N > 2 -> ACCEPT(words[RING(rank, PEER2(rank))], IS_OF) :: else fi
    }
    :: ANY_STRAYS -> goto failed
    fi
}

#define RECEIVED(peer) ARRIVES(packet[PLACE(rank, peer)], PACKED_)
inline wait_for_packets() {
    if
    :: d_step { EVERY_PEER(RECEIVED) ->
        ACCEPT(packet[PLACE(rank, PEER1(rank))], PACKED_);
        if :: N > 2 -> ACCEPT(packet[PLACE(rank, PEER2(rank))], PACKED_) :: else fi
    }
#ifndef NO_WATCH
    :: ANY_STRAYS -> goto failed
#endif
    fi
}

/* What a rank reads, it writes to its output, or folds into it. */
inline expect(cell) {
    d_step { READ(cell, call); assert(comers[call] == N && strayed != call) }
}

inline expect_line(peer) {
    if
    :: HAS_DATA(peer, rank) ->
#ifdef EARLY_LOADS
        d_step { assert(early[peer] == call); early[peer] = 0 }
#else
        expect(data[PLACE(rank, peer)])
#endif
    :: else
    fi
}

proctype Rank(byte rank) {
    byte call = 1, kind;
#ifdef EARLY_LOADS
    byte early[N];
#endif
    do
    ::  atomic { choose() };
        d_step { send(PEER1(rank)); if :: N > 2 -> send(PEER2(rank)) :: else fi };
        if
        :: kind == PACKETS || kind == TWIN ->
#ifndef NO_AGREE
            agree();
#endif
            wait_for_packets();
            expect(packet[PLACE(rank, PEER1(rank))]);
            if :: N > 2 -> expect(packet[PLACE(rank, PEER2(rank))]) :: else fi
        :: else ->
#ifdef EARLY_LOADS
            LOAD(data[PLACE(rank, PEER1(rank))], early[PEER1(rank)]);
            if :: N > 2 -> LOAD(data[PLACE(rank, PEER2(rank))], early[PEER2(rank)]) :: else fi;
#endif
            wait_for_lines();
            expect_line(PEER1(rank));
            if :: N > 2 -> expect_line(PEER2(rank)) :: else fi
        fi;
        if
        :: kind == TWO ->
            d_step { send2(PEER1(rank)); if :: N > 2 -> send2(PEER2(rank)) :: else fi };
            wait_for_results();
            expect(data2[PLACE(rank, PEER1(rank))]);
            if :: N > 2 -> expect(data2[PLACE(rank, PEER2(rank))]) :: else fi
        :: else
        fi;
        d_step {
            leavers[call]++;
            if
            :: leavers[call] == N -> leavers[call] = 0; comers[call] = 0; chosen[call] = 0
            :: else
            fi;
            call = NEXT(call); kind = 0
        }
    od;
failed:
end_failed:
    false
}

init { atomic { run Rank(0); run Rank(1); if :: N > 2 -> run Rank(2) :: else fi } }
