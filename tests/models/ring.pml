/* The rings of slots of push_reduce, and scratch that calls of other algorithms use as well:
 * cuda/rings.cuh, push_reduce.cu, exchange.cuh.
 *
 * What is where in the kernels
 *   words         those of negotiate(): released, acquired. What they say is in entry.pml
 *   slot          slot_of(): scratch of the receiving rank. A call that stages uses the same memory
 *   sent, emptied Flags: of the sending block at its receivers, and back. Epoch and number, of
 *                 NUMBERS; 24 bits in the kernels
 *   array         output is input: of each rank a slice for each rank, in PIECES
 *   Sender        send(): blocks 2q. Receiver: receive(), blocks 2q + 1; one pair. The kernel of a
 *                 rank ends when both have, `ended`, and the next starts then
 *   choose        which call the program makes next, the same on all ranks:
 *     PUSH        push_reduce: results to all, meet() at the end
 *     SCATTER     push_reduce_scatter: results to the own output, nobody meets; if there are
 *                 SCATTERS
 *     STAGED      exchange_agreed(): scratch filled by its own rank, and by peers, with two meetings
 * A signal releases what its block stored: that of the other block is released by the next announce.
 *
 * Properties (assertions, and no state without a way on)
 *   a receiver folds the piece of this call and number, from all; a sender reads its input before it
 *   is overwritten in place; all outputs are whole when a call ends; staged data are those of this
 *   call; no wait is for ever
 * Flags and pads repeat after 2^40 calls, here after EPOCHS: the program pushes and meets more often.
 *
 * Taken away by -D: RELAXED_SIGNAL, RELAXED_MEET, EARLY_LOADS (acquire of a flag), EARLY_CREDIT (a
 * slot given back before it is read), NO_CREDIT, NO_EPOCH, NO_LAST_MEET, NO_AGREE, NO_WINDOW (numbers
 * compared as if they never wrapped).
 */
#define EPOCHS 3
#include "memory.pml"
#ifndef DEPTH
#define DEPTH 2
#define NUMBERS 8
#define PIECES 9
#endif
#ifndef SCATTERS
#define SCATTERS 1
#endif
#define PUSH 1
#define SCATTER 2
#define STAGED 3

Cell words[N * 2 * N], slot[N * N * DEPTH], array[N * N * PIECES];
byte pads[N * N], sent[N * N], emptied[N * N];
byte chosen[GHOST + 1], leavers[GHOST + 1];
byte entered[N], ended[N], unpushed, unmet;

#define PAIR(at, from) ((at) * N + (from))
#define RING(at, from) (((at) * 2 + call % 2) * N + (from))
#define SLOT(at, from, piece) slot[PAIR(at, from) * DEPTH + (piece) % DEPTH]
#define ARRAY(at, slice, piece) array[PAIR(at, slice) * PIECES + (piece)]
#define INPUT(piece) (call * PIECES + (piece))
#define RESULT(piece) (100 + call * PIECES + (piece))
#define FILLING 1
#define EMPTYING 2

#define IS_OF(word) ((word) % EPOCHS == call % EPOCHS)
#define ANNOUNCED(peer) ARRIVES(words[RING(rank, peer)], IS_OF)

/* Flags::counts(). */
#define FLAG(number) (call % EPOCHS * NUMBERS + (number) % NUMBERS)
#ifdef NO_WINDOW
#define BEHIND(flag, number) ((flag) % NUMBERS >= (number))
#else
#define BEHIND(flag, number) (((flag) + NUMBERS - (number) % NUMBERS) % NUMBERS < DEPTH)
#endif
#ifdef NO_EPOCH
#define COUNTS(flag, number) BEHIND(flag, number)
#else
#define COUNTS(flag, number) ((flag) / NUMBERS == call % EPOCHS && BEHIND(flag, number))
#endif
#define SENT(peer) COUNTS(sent[PAIR(rank, peer)], piece + 1)
#define EMPTIED(peer) COUNTS(emptied[PAIR(rank, peer)], piece - DEPTH + 1)

inline choose() {
    if
    :: entered[rank] != call ->
        entered[rank] = call; ended[rank] = 0;
        if
        :: chosen[call] -> skip
        :: !chosen[call] ->
            if
            :: chosen[call] = PUSH
            :: SCATTERS && unmet < EPOCHS - 2 -> chosen[call] = SCATTER
            :: unpushed < EPOCHS - 2 -> chosen[call] = STAGED
            fi;
            unpushed = (chosen[call] == STAGED -> unpushed + 1 : 0);
            unmet = (chosen[call] == SCATTER -> unmet + 1 : 0)
        fi;
        d_step {  /* the input, which this rank alone reads */
            i = 0;
            do
            :: i < N * PIECES && chosen[call] != STAGED ->
                SEE(array[rank * N * PIECES + i]);
                array[rank * N * PIECES + i].seen = call * PIECES + i % PIECES; i++
            :: else -> break
            od;
            i = 0
        }
    :: else -> skip
    fi;
    kind = chosen[call]
}

/* A release of all that both blocks of this rank stored in the calls before. */
inline announce() {
    d_step {
        drain_stores(); drain_results(); drain_staged();
        STORE(words[RING(PEER1(rank), rank)], call);
        if :: N > 2 -> STORE(words[RING(PEER2(rank), rank)], call) :: else fi
    }
}

inline agree() {
#ifndef NO_AGREE
    d_step { EVERY_PEER(ANNOUNCED) ->
        ACCEPT(words[RING(rank, PEER1(rank))], IS_OF);
        if :: N > 2 -> ACCEPT(words[RING(rank, PEER2(rank))], IS_OF) :: else fi
    }
#else
    skip
#endif
}

/* What the sender stored; the receiver's results; what it filled and emptied in a staged call. */
inline drain_stores() {
    i = 0;
    do
    :: i < DEPTH ->
        SEE(SLOT(PEER1(rank), rank, i));
        if :: N > 2 -> SEE(SLOT(PEER2(rank), rank, i)) :: else fi;
        i++
    :: else -> break
    od;
    i = 0
}
inline drain_results() {
    i = 0;
    do
    :: i < PIECES ->
        SEE(ARRAY(PEER1(rank), rank, i));
        if :: N > 2 -> SEE(ARRAY(PEER2(rank), rank, i)) :: else fi;
        i++
    :: else -> break
    od;
    i = 0
}
inline drain_staged() {
    SEE(SLOT(rank, rank, 0)); SEE(SLOT(rank, PEER1(rank), 0)); SEE(SLOT(PEER1(rank), rank, 1));
    if :: N > 2 -> SEE(SLOT(rank, PEER2(rank), 0)); SEE(SLOT(PEER2(rank), rank, 1)) :: else fi
}

#define ARRIVED (call * 4 + step)
#define MET(peer) \
    (pads[PAIR(rank, peer)] == ARRIVED || pads[PAIR(rank, peer)] == ARRIVED + 1)
inline meet() {
    d_step {
        step++;
#ifndef RELAXED_MEET
        drain_results(); drain_staged();
#endif
        pads[PAIR(PEER1(rank), rank)] = ARRIVED;
        if :: N > 2 -> pads[PAIR(PEER2(rank), rank)] = ARRIVED :: else fi
    };
    EVERY_PEER(MET)
}

/* The kernel ends, and then what the user's next kernel sees. */
inline end() {
    d_step {
        ended[rank]++;
        if
        :: ended[rank] == 2 ->
            i = 0;
            do
            :: i < PIECES ->
                if
                :: kind == PUSH ->
                    READ(ARRAY(rank, PEER1(rank), i), RESULT(i));
                    if :: N > 2 -> READ(ARRAY(rank, PEER2(rank), i), RESULT(i)) :: else fi
                :: else
                fi;
                i++
            :: else -> break
            od;
            i = 0;
            leavers[call]++;
            if :: leavers[call] == N -> leavers[call] = 0; chosen[call] = 0 :: else fi
        :: else
        fi
    };
    d_step { ended[rank] == 2 || entered[rank] != call -> call = NEXT(call); step = 0; piece = 0 }
}

inline send(peer) {
    READ(ARRAY(rank, peer, piece), INPUT(piece));
    STORE(SLOT(peer, rank, piece), INPUT(piece))
}

proctype Sender(byte rank) {
    byte call = 1, kind, piece, step, i;
    do
    ::  atomic { choose(); announce() };
        agree();
        do
        :: kind != STAGED && piece < PIECES ->
#ifndef NO_CREDIT
            piece < DEPTH || EVERY_PEER(EMPTIED);
#endif
            d_step {  /* the signal: the stores may be late, if it does not release them */
                send(PEER1(rank));
                if :: N > 2 -> send(PEER2(rank)) :: else fi;
#ifndef RELAXED_SIGNAL
                drain_stores();
#endif
                piece++;
                sent[PAIR(PEER1(rank), rank)] = FLAG(piece);
                if :: N > 2 -> sent[PAIR(PEER2(rank), rank)] = FLAG(piece) :: else fi
            }
        :: else -> break
        od;
        end()
    od
}

inline fold() {
    d_step {
        READ(ARRAY(rank, rank, piece), INPUT(piece));
#ifdef EARLY_LOADS
        assert(early == INPUT(piece)); early = 0
#else
        READ(SLOT(rank, PEER1(rank), piece), INPUT(piece));
#endif
        if :: N > 2 -> READ(SLOT(rank, PEER2(rank), piece), INPUT(piece)) :: else fi;
        STORE(ARRAY(rank, rank, piece), RESULT(piece)); SEE(ARRAY(rank, rank, piece));
        if
        :: kind == PUSH ->
            STORE(ARRAY(PEER1(rank), rank, piece), RESULT(piece));
            if :: N > 2 -> STORE(ARRAY(PEER2(rank), rank, piece), RESULT(piece)) :: else fi
        :: else
        fi
    }
}

inline give_back() {
    if
    :: piece + DEPTH < PIECES -> d_step {
        emptied[PAIR(PEER1(rank), rank)] = FLAG(piece + 1);
        if :: N > 2 -> emptied[PAIR(PEER2(rank), rank)] = FLAG(piece + 1) :: else fi
    }
    :: else
    fi
}

inline stage() {
    d_step {
        STORE(SLOT(rank, rank, 0), call); STORE(SLOT(rank, PEER1(rank), 0), call);
        if :: N > 2 -> STORE(SLOT(rank, PEER2(rank), 0), call) :: else fi
    };
    meet();
    d_step { READ(SLOT(PEER1(rank), rank, 0), call); READ(SLOT(PEER1(rank), PEER1(rank), 0), call) };
    if :: N > 2 -> d_step { READ(SLOT(PEER2(rank), rank, 0), call) } :: else fi;
    d_step {
        STORE(SLOT(PEER1(rank), rank, 1), 100 + call);
        if :: N > 2 -> STORE(SLOT(PEER2(rank), rank, 1), 100 + call) :: else fi
    };
    meet();
    d_step { READ(SLOT(rank, PEER1(rank), 1), 100 + call) };
    if :: N > 2 -> d_step { READ(SLOT(rank, PEER2(rank), 1), 100 + call) } :: else fi
}

proctype Receiver(byte rank) {
    byte call = 1, kind, piece, step, i;
#ifdef EARLY_LOADS
    byte early;
#endif
    do
    ::  atomic { choose() };
        agree();
        do
        :: kind != STAGED && piece < PIECES ->
#ifdef EARLY_LOADS
            LOAD(SLOT(rank, PEER1(rank), piece), early);
#endif
            EVERY_PEER(SENT);
#ifdef EARLY_CREDIT
            give_back(); fold();
#else
            fold(); give_back();
#endif
            piece++
        :: else -> break
        od;
        if
        :: kind == STAGED -> stage()
#ifndef NO_LAST_MEET
        :: kind == PUSH -> meet()
#endif
        :: else
        fi;
        end()
    od
}

init {
    atomic {
        run Sender(0); run Receiver(0); run Sender(1); run Receiver(1);
        if :: N > 2 -> run Sender(2); run Receiver(2) :: else fi
    }
}
