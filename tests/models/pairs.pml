/* Lines between two ranks through a ring: cuda/line_pairs.cuh, and the flags of lines.cuh.
 *
 * What is where in the kernels
 *   place         Ring::place(): a line with its flag, which the link keeps whole. Accesses are relaxed
 *   Group         pass_lines(), eight lanes of either rank; two of them in a rank, of blocks of their
 *                 own. The kernel of a rank ends when both have, and the next starts then
 *   choose        how many rounds a call has: one time more than the ring has places, or two
 *   IS_LINE       the flag: the epoch, and the turn of the ring
 *
 * Properties (assertions, and no state without a way on)
 *   the line that is taken is that of this call and round, and no later one can be in its place yet
 * Flags repeat after 2^40 calls, here after EPOCHS: every call writes all places.
 * What lines.pml has is not here: fingerprints, lines that are not whole, words of peers.
 *
 * Taken away by -D: ONE_BUFFER, NO_EPOCH, NO_TURN (in flags), FEW_PLACES (one less), FAR_AHEAD (a line
 * sent a round too early).
 */
#include "memory.pml"
#define GROUPS 2
#ifdef FEW_PLACES
#define ROUNDS 3
#else
#define ROUNDS 4
#endif
#ifdef FAR_AHEAD
#define AHEAD 2
#else
#define AHEAD 1
#endif

Cell place[2 * 2 * GROUPS * ROUNDS];
byte open_[2], ended[2];
byte rounds[GHOST + 1], leavers[GHOST + 1];

#ifdef ONE_BUFFER
#define PARITY 0
#else
#define PARITY (call % 2)
#endif
#define PLACE(at, number) \
    place[(((at) * 2 + PARITY) * GROUPS + group) * ROUNDS + (number) % ROUNDS]
#define LINE(number) (1 + call * 8 + (number))
#ifdef NO_EPOCH
#define IS_EPOCH(line) true
#else
#define IS_EPOCH(line) ((line - 1) / 8 % EPOCHS == call % EPOCHS)
#endif
#ifdef NO_TURN
#define IS_TURN(line) true
#else
#define IS_TURN(line) ((line - 1) % 8 / ROUNDS == round / ROUNDS)
#endif
#define IS_LINE(line) (line != 0 && IS_EPOCH(line) && IS_TURN(line))

inline choose() {
    if
    :: rounds[call] -> skip
    :: !rounds[call] ->
        if
        :: rounds[call] = ROUNDS + 1
        :: rounds[call] = ROUNDS + 3
        fi
    fi
}

inline send(number) {
    if
    :: number < rounds[call] -> STORE(PLACE(1 - rank, number), LINE(number))
    :: else
    fi
}

proctype Group(byte rank; byte group) {
    byte call = 1, round, i;
    do
    ::  atomic { open_[rank] == call; choose() };
        d_step {
            i = 0;
            do
            :: i < AHEAD -> send(i); i++
            :: else -> break
            od;
            i = 0
        };
        do
        :: round < rounds[call] ->
            d_step { send(round + AHEAD) };
            d_step {
                ARRIVES(PLACE(rank, round), IS_LINE) ->
                ACCEPT(PLACE(rank, round), IS_LINE);
                READ(PLACE(rank, round), LINE(round));
                round++
            }
        :: else -> break
        od;
        skip;
        d_step {
            round = 0;
            ended[rank]++;
            leavers[call]++;
            if
            :: leavers[call] == 2 * GROUPS -> leavers[call] = 0; rounds[call] = 0
            :: else
            fi;
            call = NEXT(call);
            if
            :: ended[rank] == GROUPS -> ended[rank] = 0; open_[rank] = call
            :: else
            fi
        }
    od
}

init {
    atomic {
        open_[0] = 1; open_[1] = 1;
        run Group(0, 0); run Group(0, 1); run Group(1, 0); run Group(1, 1)
    }
}
