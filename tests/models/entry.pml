/* Entry negotiation, meetings, and the loop over chunks: cuda/negotiate.cuh and cuda/exchange.cuh.
 *
 * What is where in the kernels
 *   words, places   the ring of two by parity that announce() writes and agree() reads: `words` is
 *                   halves 0 to 4 (fingerprint first), `places` half 5, which is the released one
 *   pads            those of meet(): epoch << STEP_BITS | step, here of EPOCHS epochs and STEPS steps
 *   input           an array that a kernel of the own rank wrote before; peers read it in `work`
 *   output          of each rank, a slice for each peer that writes it in `work`
 *   fill_, empty_   scratch 0/1 and 2/3 of Part::scratch(), by the parity of the chunk
 *   choose          which call the program makes next, the same on all ranks, unless one strays:
 *     DIRECT        exchange(): work MEET
 *     STAGED        exchange(): fill(0) MEET { work(c) fill(c + 1) MEET empty(c) }
 *     QUIET         ll.cu: announce<false>, agree, and no meeting
 * One block a rank: block b deals with blocks b alone, and block 0 announces.
 *
 * Properties (assertions, and no state without a way on but that of a failed lane)
 *   all data read are those of this call and chunk, all results are whole when the call ends; nobody
 *   passes agree() while a rank calls something else, and then every rank fails; no wait is for ever
 *
 * Taken away by -D: RELAXED_ANNOUNCE, EARLY_LOADS (acquire of agree), RELAXED_MEET, NO_LAST_MEET,
 * NO_FIRST_MEET, ONE_PLACE (ring of one), NO_EPOCH (in words), NO_FINGERPRINT,
 * ONE_SCRATCH, SIGNED_PADS (growing values compared as signed numbers).
 */
#include "memory.pml"
#ifndef CHUNKS
#define CHUNKS 3
#endif
#define STEPS (CHUNKS + 2)
#define WRAP (EPOCHS * STEPS)
#define DIRECT 1
#define STAGED 2
#define QUIET 3

Cell words[N * 2 * N], places[N * 2 * N], pads[N * N];
Cell input[N], output[N * N], fill_[N * 2], empty_[N * 2 * N];
byte chosen[GHOST + 1];                      /* the program */
byte comers[GHOST + 1], leavers[GHOST + 1];  /* how many ranks began and ended a call */
byte strayed;                                /* the call in which a rank called something else */
byte quiet;                                  /* calls without a meeting since the last one */

#define PAIR(at, from) ((at) * N + (from))
#ifdef ONE_PLACE
#define RING(at, from) PAIR((at) * 2, from)
#else
#define RING(at, from) PAIR((at) * 2 + call % 2, from)
#endif
#ifdef ONE_SCRATCH
#define PARITY(chunk) 0
#else
#define PARITY(chunk) ((chunk) % 2)
#endif

/* A word: half_word(). `kind` stands for the fingerprint. */
#define WORD(call, kind) ((call) * 4 + (kind))
#ifdef NO_EPOCH
#define IS_OF(word) (word != 0)
#else
#define IS_OF(word) ((word) / 4 % EPOCHS == call % EPOCHS)
#endif
#define ANNOUNCED(peer) \
    (ARRIVES(words[RING(rank, peer)], IS_OF) && ARRIVES(places[RING(rank, peer)], IS_OF))
#define STRAYS_(word) (IS_OF(word) && (word) % 4 != kind)
#ifdef NO_FINGERPRINT
#define STRAYS(peer) false
#else
#define STRAYS(peer) ARRIVES(words[RING(rank, peer)], STRAYS_)
#endif
#define STRAYED(peer) (words[RING(rank, peer)].seen % 4 != kind)

#define ARRIVED ((call % EPOCHS * STEPS + step) % WRAP)
#ifdef SIGNED_PADS
#define MET_(pad) (((pad) + WRAP - ARRIVED) % WRAP < WRAP / 2)
#else
#define MET_(pad) (((pad) + WRAP - ARRIVED) % WRAP <= 1)
#endif
#define MET(peer) ARRIVES(pads[PAIR(rank, peer)], MET_)

/* All that a rank stored. */
inline drain() {
    i = 0;
    do
    :: i < N ->
        SEE(words[PAIR(i * 2, rank)]); SEE(words[PAIR(i * 2 + 1, rank)]);
        SEE(places[PAIR(i * 2, rank)]); SEE(places[PAIR(i * 2 + 1, rank)]);
        SEE(pads[PAIR(i, rank)]); SEE(output[PAIR(i, rank)]);
        SEE(empty_[PAIR(i * 2, rank)]); SEE(empty_[PAIR(i * 2 + 1, rank)]);
        i++
    :: else -> break
    od;
    SEE(input[rank]); SEE(fill_[rank * 2]); SEE(fill_[rank * 2 + 1]);
    i = 0
}

inline choose() {
    if
    :: chosen[call] -> skip
    :: !chosen[call] -> atomic {
        if
        :: chosen[call] = DIRECT
        :: chosen[call] = STAGED
        :: quiet < EPOCHS - 2 -> chosen[call] = QUIET  /* a pad repeats after 2^40 calls */
        fi;
        quiet = (chosen[call] == QUIET -> quiet + 1 : 0)
    }
    fi;
    if
    :: kind = chosen[call]
    :: !strayed -> kind = (chosen[call] == DIRECT -> QUIET : DIRECT); strayed = call
    fi;
    comers[call]++
}

inline announce(released) {
    d_step {
        i = 0;
        do
        :: i < N && i != rank -> STORE(words[RING(i, rank)], WORD(call, kind)); i++
        :: i < N && i == rank -> i++
        :: else -> break
        od;
        if :: released -> drain() :: else fi;
        i = 0;
        do
        :: i < N && i != rank -> STORE(places[RING(i, rank)], WORD(call, kind)); i++
        :: i < N && i == rank -> i++
        :: else -> break
        od;
        i = 0
    }
}

/* Watch::over() looks at the words of all peers: `differs`. */
inline agree() {
    if
    :: d_step { EVERY_PEER(ANNOUNCED) ->
        ACCEPT(words[RING(rank, PEER1(rank))], IS_OF);
        ACCEPT(places[RING(rank, PEER1(rank))], IS_OF);
        if
        :: N > 2 ->
            ACCEPT(words[RING(rank, PEER2(rank))], IS_OF);
            ACCEPT(places[RING(rank, PEER2(rank))], IS_OF)
        :: else
        fi
    }
    :: ANY_PEER(STRAYS) -> goto failed
    fi;
#ifndef NO_FINGERPRINT
    if
    :: STRAYED(PEER1(rank)) || (N > 2 && STRAYED(PEER2(rank))) -> goto failed
    :: else
    fi;
#endif
    d_step {
        assert(comers[call] == N && strayed != call);  /* all agree */
        i = 0;
        do
        :: i < N ->
            if
            :: i != rank -> assert(places[RING(rank, i)].seen == WORD(call, kind))
            :: else
            fi;
            i++
        :: else -> break
        od;
        i = 0
    }
}

inline meet() {
    d_step {
        step++;
#ifndef RELAXED_MEET
        drain();
#endif
        STORE(pads[PAIR(PEER1(rank), rank)], ARRIVED);
        if :: N > 2 -> STORE(pads[PAIR(PEER2(rank), rank)], ARRIVED) :: else fi
    };
    d_step { EVERY_PEER(MET) ->
        ACCEPT(pads[PAIR(rank, PEER1(rank))], MET_);
        if :: N > 2 -> ACCEPT(pads[PAIR(rank, PEER2(rank))], MET_) :: else fi
    }
}

inline expect(cell, value) {
    d_step { READ(cell, value) }
}

/* `work` of DIRECT: reads the inputs of all, then writes its slice of all outputs. */
inline direct() {
#ifdef EARLY_LOADS
    assert(early1 == call); early1 = 0;
#else
    expect(input[PEER1(rank)], call);
#endif
    if :: N > 2 -> expect(input[PEER2(rank)], call) :: else fi;
    d_step {
        STORE(output[PAIR(PEER1(rank), rank)], call);
        if :: N > 2 -> STORE(output[PAIR(PEER2(rank), rank)], call) :: else fi
    };
#ifndef NO_LAST_MEET
    meet();
#endif
    expect(output[PAIR(rank, PEER1(rank))], call);
    if :: N > 2 -> expect(output[PAIR(rank, PEER2(rank))], call) :: else fi
}

#define PART(chunk) (call * CHUNKS + (chunk))
#define FILLED(at, chunk) fill_[(at) * 2 + PARITY(chunk)]
#define EMPTIED(at, chunk, from) empty_[PAIR((at) * 2 + PARITY(chunk), from)]
inline staged() {
    d_step { STORE(FILLED(rank, 0), PART(0)) };
#ifndef NO_FIRST_MEET
    meet();
#endif
    do
    :: chunk < CHUNKS ->
        expect(FILLED(PEER1(rank), chunk), PART(chunk));  /* work(chunk) */
        if :: N > 2 -> expect(FILLED(PEER2(rank), chunk), PART(chunk)) :: else fi;
        d_step {
            STORE(EMPTIED(PEER1(rank), chunk, rank), PART(chunk));
            if :: N > 2 -> STORE(EMPTIED(PEER2(rank), chunk, rank), PART(chunk)) :: else fi;
            if :: chunk + 1 < CHUNKS -> STORE(FILLED(rank, chunk + 1), PART(chunk + 1)) :: else fi
        };
#ifdef NO_LAST_MEET
        if :: chunk + 1 < CHUNKS -> meet() :: else fi;
#else
        meet();
#endif
        expect(EMPTIED(rank, chunk, PEER1(rank)), PART(chunk));  /* empty(chunk) */
        if :: N > 2 -> expect(EMPTIED(rank, chunk, PEER2(rank)), PART(chunk)) :: else fi;
        chunk++
    :: else -> break
    od;
    chunk = 0
}

proctype Rank(byte rank) {
    byte call = 1, kind, step, chunk, i;
#ifdef EARLY_LOADS
    byte early1;
#endif
    do
    ::  d_step { STORE(input[rank], call) };  /* what ran before on the stream */
        atomic { choose() };
#ifdef RELAXED_ANNOUNCE
        announce(false);
#else
        announce(kind != QUIET);
#endif
#ifdef EARLY_LOADS
        if :: kind == DIRECT -> LOAD(input[PEER1(rank)], early1) :: else fi;
#endif
        agree();
        if
        :: kind == DIRECT -> direct()
        :: kind == STAGED -> staged()
        :: else
        fi;
        d_step {
            leavers[call]++;
            if
            :: leavers[call] == N -> leavers[call] = 0; comers[call] = 0; chosen[call] = 0
            :: else
            fi;
            call = NEXT(call); step = 0; kind = 0
        }
    od;
failed:
end_failed:
    false
}

init { atomic { run Rank(0); run Rank(1); if :: N > 2 -> run Rank(2) :: else fi } }
