/* Mail: letters and slots of channels between ranks: cuda/mail.cu, channel.cuh, mail.cuh.
 *
 * Rank r pushes MESSAGES to rank r + 1 and drains as many of rank r - 1, on CHANNELS channels; where
 * there are as many channels as ranks, every launch does both (send_recv), and the next starts when
 * both are done.
 *
 * What is where in the kernels
 *   Pusher, Drainer   one block of a track: push_letter(), drain_letter(), pass_slots()
 *   header, body      of a letter, whole with their flags: a packet, and lines; of FLAGS here
 *   slot              data of large messages, stored plainly; filled and drained are gate() and
 *                     post(): released, acquired
 *   messages      of Progress: leave(), and `tickets` for what is less than a whole one
 *   taken, refused    words of a Desk, `expected` what goes with a refusal
 *   open_             what the stream does: the blocks of a launch start when the one before ended
 *   kinds             SMALL: a letter with data. LARGE: CHUNKS through the slots of all tracks.
 *                     Each message is of either kind; one time, a drainer expects something else, if there are
 *                     STRANGERS
 * Waits of until() end as well where the mail of the own rank failed, or the peer refused; and by
 * their budget, which is modelled where a peer failed for a reason that has nothing to do with us.
 *
 * Properties (assertions, and no state without a way on but that of blocks at their end)
 *   what is drained is what was pushed, by number and chunk; nothing is written for a message that is
 *   not expected, and both sides learn of it; no wait is for ever
 * Flags repeat after 2^32 - 1 messages, here after FLAGS: a letter has data once in so many.
 *
 * Taken away by -D: RELAXED_POST, EARLY_LOADS (acquire of a slot), EARLY_CREDIT (a slot given back
 * before it is read), NO_SLOT_CREDIT, NO_LETTER_CREDIT, NO_FLAG (of data), FLAG_ZERO (as fresh memory
 * has it), NO_COMPARISON (of headers), NO_REFUSAL, RELAXED_REFUSAL, EARLY_TAKEN and EARLY_ADVANCE (by
 * the first to leave).
 */
#include "memory.pml"
#ifndef CHANNELS
#define CHANNELS 1
#endif
#ifndef TRACKS
#define TRACKS 2
#endif
#ifndef MESSAGES
#define MESSAGES 6
#endif
#ifndef LETTERS
#define LETTERS 2
#endif
#define SLOTS 1
#ifndef CHUNKS
#define CHUNKS 3
#endif
#define FLAGS 3
#ifndef STRANGERS
#define STRANGERS 1
#endif
#define SMALL 1
#define LARGE 2
#define PUSHES 0
#define DRAINS 1

Cell header[CHANNELS * LETTERS], body[CHANNELS * LETTERS], slot[CHANNELS * TRACKS * SLOTS];
Cell expected[CHANNELS];
byte filled[CHANNELS * TRACKS], drained[CHANNELS * TRACKS], taken[CHANNELS], refused[CHANNELS];
byte messages[CHANNELS * 2], tickets[CHANNELS * 2], passed[CHANNELS * 2 * TRACKS];
byte open_[CHANNELS * 2], ended[CHANNELS * 2];
byte kinds[CHANNELS * (MESSAGES + 1)], bare[CHANNELS * LETTERS];
byte strange, strange_channel;  /* the message that is not what its drainer expects */
bool failed[N];

#define FROM(channel) (channel)
#define TO(channel) ((channel + 1) % N)
#define SIDE(channel, side) ((channel) * 2 + side)
#define LETTER(number) (channel * LETTERS + (number) % LETTERS)
#define TRACK (channel * TRACKS + track)
#define SLOT(count) slot[TRACK * SLOTS + (count) % SLOTS]
#define PART (number * 8 + chunk)
#define KIND kinds[channel * (MESSAGES + 1) + number]
#define BLOCKS (KIND == LARGE -> TRACKS : 1)
#define IS_STRANGE (strange == number && strange_channel == channel)

#ifdef FLAG_ZERO
#define HAS_FLAG(packet) ((packet) % FLAGS == number % FLAGS)
#else
#define HAS_FLAG(packet) (packet != 0 && (packet) % FLAGS == number % FLAGS)
#endif
#ifdef NO_FLAG
#define HAS_DATA(packet) true
#else
#define HAS_DATA(packet) HAS_FLAG(packet)
#endif

/* Both parts of a send_recv are open at the same time. */
#if CHANNELS == N
#define OTHER(side) (side == PUSHES -> SIDE((channel + N - 1) % N, DRAINS) \
                                     : SIDE((channel + 1) % N, PUSHES))
#define OPEN(side) (open_[SIDE(channel, side)] >= turn && open_[OTHER(side)] >= turn)
#else
#define OPEN(side) (open_[SIDE(channel, side)] >= turn)
#endif

/* The bytes of a message, the first time that either side asks. */
inline choose() {
    if
    :: KIND -> skip
    :: !KIND ->
        if
        :: KIND = SMALL
        :: bare[LETTER(turn)] < FLAGS - 2 -> KIND = LARGE
        fi;
        bare[LETTER(turn)] = (KIND == LARGE -> bare[LETTER(turn)] + 1 : 0);
        if :: STRANGERS && !strange -> strange = turn; strange_channel = channel :: true fi
    fi
}

/* The start of a launch, for a block of it: Channel::Channel. A small message has no block for the
 * second track. */
inline start(side, rank) {
    if
    :: turn > MESSAGES || failed[rank] -> goto done
    :: else -> atomic { OPEN(side) || failed[rank];
        number = 0;
        if
        :: failed[rank] -> goto done
        :: else ->
            if
            :: open_[SIDE(channel, side)] == turn ->
                number = turn; choose();
                number = (track == 0 || KIND == LARGE -> messages[SIDE(channel, side)] + 1 : 0);
                if
                :: side == DRAINS && track == 0 -> taken[channel] = number - 1
                :: else
                fi
            :: else
            fi
        fi
    }
    fi
}

/* leave(), and then the end of the block. */
inline leave(side) {
    d_step {
#ifdef EARLY_ADVANCE
        messages[SIDE(channel, side)] = number;
#endif
#ifdef EARLY_TAKEN
        if :: side == DRAINS -> taken[channel] = number :: else fi;
#endif
        tickets[SIDE(channel, side)]++;
        if
        :: tickets[SIDE(channel, side)] == BLOCKS ->
            tickets[SIDE(channel, side)] = 0;
            messages[SIDE(channel, side)] = number
        :: else
        fi;
        ended[SIDE(channel, side)]++;
        if
        :: ended[SIDE(channel, side)] == BLOCKS ->
            ended[SIDE(channel, side)] = 0; open_[SIDE(channel, side)] = turn + 1;
            if :: open_[SIDE(channel, 1 - side)] > turn -> KIND = 0 :: else fi
        :: else
        fi;
        turn++; chunk = 0
    }
}

#define LETTER_IS_FREE (taken[channel] + LETTERS >= number)
#define SLOT_IS_FREE (drained[TRACK] + SLOTS > passed[SIDE(channel, PUSHES) * TRACKS + track])
#define SLOT_IS_FULL (filled[TRACK] > passed[SIDE(channel, DRAINS) * TRACKS + track])

/* alive() of the pusher finds a refusal: acquire, then what the peer expected. */
#define REFUSED (refused[channel] != 0)
inline learn() {
    d_step { READ(expected[channel], refused[channel]); failed[FROM(channel)] = true };
    goto done
}
/* A budget ends: not where the peer must have refused what this rank pushed. */
#define LOST(peer) (failed[peer] && !(strange && strange_channel == channel))

proctype Pusher(byte channel; byte track) {
    byte turn = 1, number, chunk;
    do
    ::  start(PUSHES, FROM(channel));
        if
        :: number == 0 -> turn++
        :: else ->
            assert(number == turn);
            if
            :: REFUSED -> learn()
            :: !REFUSED && track > 0
#ifdef NO_LETTER_CREDIT
            :: !REFUSED && track == 0
#else
            :: !REFUSED && track == 0 && LETTER_IS_FREE
#endif
            :: failed[FROM(channel)] -> goto done
            :: LOST(TO(channel)) -> failed[FROM(channel)] = true; goto done
            fi;
            d_step {
                if :: track == 0 -> STORE(header[LETTER(number)], number) :: else fi;
                if
                :: KIND == SMALL -> STORE(body[LETTER(number)], number); chunk = CHUNKS
                :: else -> chunk = track
                fi
            };
            do
            :: chunk < CHUNKS ->
                if
#ifdef NO_SLOT_CREDIT
                :: true
#else
                :: SLOT_IS_FREE
#endif
                :: REFUSED -> learn()
                :: failed[FROM(channel)] -> goto done
                :: LOST(TO(channel)) -> failed[FROM(channel)] = true; goto done
                fi;
                d_step {
                    STORE(SLOT(passed[SIDE(channel, PUSHES) * TRACKS + track]), PART);
#ifndef RELAXED_POST
                    SEE(SLOT(0)); SEE(SLOT(SLOTS - 1));
#endif
                    passed[SIDE(channel, PUSHES) * TRACKS + track]++;
                    filled[TRACK] = passed[SIDE(channel, PUSHES) * TRACKS + track];
                    chunk = chunk + TRACKS
                }
            :: else -> break
            od;
            leave(PUSHES)
        fi
    od;
done:
    skip
}

/* Of the drainer, while it waits. */
inline give_up() {
    if
    :: failed[TO(channel)] -> goto done
    :: !failed[TO(channel)] -> failed[TO(channel)] = true; goto done
    fi
}
#define GIVES_UP (failed[TO(channel)] || failed[FROM(channel)])

inline greet() {
    if
    :: d_step { ARRIVES(header[LETTER(number)], HAS_FLAG) -> ACCEPT(header[LETTER(number)], HAS_FLAG) }
    :: GIVES_UP -> give_up()
    fi;
    READ(header[LETTER(number)], number);
#ifndef NO_COMPARISON
    if
    :: IS_STRANGE ->
        d_step { STORE(expected[channel], number) };
        d_step {
#ifndef NO_REFUSAL
#ifndef RELAXED_REFUSAL
            SEE(expected[channel]);
#endif
            refused[channel] = number;
#endif
            failed[TO(channel)] = true
        };
        goto done
    :: else
    fi
#endif
}

proctype Drainer(byte channel; byte track) {
    byte turn = 1, number, chunk;
#ifdef EARLY_LOADS
    byte early;
#endif
    do
    ::  start(DRAINS, TO(channel));
        if
        :: number == 0 -> turn++
        :: else ->
            assert(number == turn);
            greet();
            if
            :: KIND == SMALL ->
                if
                :: d_step { ARRIVES(body[LETTER(number)], HAS_DATA) ->
                    ACCEPT(body[LETTER(number)], HAS_DATA) }
                :: GIVES_UP -> give_up()
                fi;
                d_step { READ(body[LETTER(number)], number); assert(!IS_STRANGE); chunk = CHUNKS }
            :: else -> chunk = track
            fi;
            do
            :: chunk < CHUNKS ->
#ifdef EARLY_LOADS
                LOAD(SLOT(passed[SIDE(channel, DRAINS) * TRACKS + track]), early);
#endif
                if
                :: SLOT_IS_FULL
                :: GIVES_UP -> give_up()
                fi;
#ifdef EARLY_CREDIT
                drained[TRACK] = passed[SIDE(channel, DRAINS) * TRACKS + track] + 1;
#endif
                d_step {
#ifdef EARLY_LOADS
                    assert(early == PART); early = 0;
#else
                    READ(SLOT(passed[SIDE(channel, DRAINS) * TRACKS + track]), PART);
#endif
                    assert(!IS_STRANGE);
                    passed[SIDE(channel, DRAINS) * TRACKS + track]++;
                    drained[TRACK] = passed[SIDE(channel, DRAINS) * TRACKS + track];
                    chunk = chunk + TRACKS
                }
            :: else -> break
            od;
            leave(DRAINS)
        fi
    od;
done:
    skip
}

init {
    byte i;
    atomic {
        do
        :: i < CHANNELS ->
            open_[SIDE(i, PUSHES)] = 1; open_[SIDE(i, DRAINS)] = 1;
            run Pusher(i, 0); run Drainer(i, 0);
            if :: TRACKS > 1 -> run Pusher(i, 1); run Drainer(i, 1) :: else fi;
            i++
        :: else -> break
        od
    }
}
