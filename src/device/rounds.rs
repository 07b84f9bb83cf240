//! Point to point: a batch of sends and receives of one rank as the operations that it puts on a stream.
//!
//! # Rings
//! Each ordered pair of ranks has a ring of [`CELLS`] cells in the sender's memory. A message is cut into chunks as long as a
//! cell, and the chunks of a pair's messages take its cells in turn for as long as the pair lives. Two words belong to the
//! ring: the *head* counts what has been published, chunks and messages without data alike, the *tail* the chunks that the
//! receiver is done with. Before a sender writes to a cell, it waits until the receiver is done with the chunk that lay there.
//! See [`rings`](crate::device::rings).
//!
//! # Order
//! A batch is a sequence of rounds. Round j takes the j-th chunk of every pair: first it sends, to all ranks, then it receives,
//! from all ranks. Messages of one pair follow each other in the order in which they were issued. If the messages of a pair are
//! in one batch at both ends, a chunk is sent and received in the same round, and a send waits only for receives of the round
//! [`CELLS`] before. So batches of any length run to their end on a single queue a rank. Messages that both ends cut into
//! batches differently do so too, as long as no more than [`CELLS`] chunks of a pair are under way.

use crate::counts::Counts;
use crate::types::Rank;

/// The cells of a ring.
pub const CELLS: usize = 2;

/// A batch as operations. Values of words are counted from its beginning; see [`rings`](crate::device::rings).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    /// In the order in which they are submitted. Words that follow each other are one call of the driver.
    pub operations: Vec<StreamOperation>,
    /// What goes through each ring that is used.
    pub flows: Vec<Flow>,
}

/// What goes through a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The rank at the other end.
    pub peer: Rank,
    /// Whether to it or from it.
    pub direction: Direction,
    /// What is counted by the head: chunks, and messages without data.
    pub published: u64,
    /// The chunks.
    pub chunks: u64,
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From this rank to its peer.
    Send,
    /// From the peer to this rank.
    Receive,
}

/// A message of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The rank at the other end.
    pub peer: Rank,
    /// Whether to it or from it.
    pub direction: Direction,
    /// Where its bytes are.
    pub part: TensorPart,
}

/// Bytes of one of a batch's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// The tensor's number.
    pub tensor: usize,
    /// The first byte.
    pub offset: usize,
    /// How many they are.
    pub len: usize,
}

/// An operation of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOperation {
    /// Waits for a word or writes one.
    Word(RingWord),
    /// Copies bytes.
    Copy {
        /// From where.
        from: CopyEnd,
        /// To where; of the same length.
        into: CopyEnd,
    },
}

/// A wait for a ring's word, or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingWord {
    /// Waits until the cell of a chunk may be written.
    Credit {
        /// The chunk's receiver.
        to: Rank,
        /// Its number among the batch's chunks to that rank, from 0.
        chunk: u64,
    },
    /// Says that so many chunks and messages without data have been published.
    Publish {
        /// Their receiver.
        to: Rank,
        /// The number, from 1.
        number: u64,
    },
    /// Waits until so many chunks and messages without data have been published.
    Await {
        /// Their sender.
        from: Rank,
        /// The number, from 1.
        number: u64,
    },
    /// Says that this rank is done with a chunk, and all before it.
    Release {
        /// The chunk's sender.
        from: Rank,
        /// Its number among the batch's chunks from that rank, from 0.
        chunk: u64,
    },
}

/// Where a copy reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// In a tensor.
    Tensor(TensorPart),
    /// In a cell of a ring, from its beginning.
    Cell {
        /// The rank at the other end of the ring.
        peer: Rank,
        /// Whether the ring is this rank's, for messages to the peer, or the peer's.
        direction: Direction,
        /// The number of the chunk among the batch's chunks of this ring, from 0.
        chunk: u64,
        /// How many bytes.
        len: usize,
    },
}

/// Messages that a rank sends to itself and that could never end, or differ from their receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ToSelfError {
    /// A send and the receive that it meets differ.
    #[error("this rank sends itself {sent} bytes, but receives {received}")]
    Lengths {
        /// The bytes that are sent.
        sent: usize,
        /// Those that are received.
        received: usize,
    },
    /// A message has no counterpart in its batch, and is too long to be kept.
    #[error(
        "this rank sends itself {bytes} bytes outside a batch that also receives them, which it can do with {cell} bytes; \
         put both into one batch"
    )]
    TooLong {
        /// Its bytes.
        bytes: usize,
        /// Those of a cell.
        cell: usize,
    },
    /// There are more messages without a counterpart than can be kept.
    #[error(
        "this rank has sent itself {messages} messages that it has not received, which it can do with {CELLS}; \
         put sends and receives into one batch"
    )]
    TooMany {
        /// How many they are.
        messages: i64,
    },
}

/// Copies up to this size are made together, once all that are waited for have come.
const SHORT_BYTES: usize = 64 * 1024;

impl Rounds {
    /// The rounds of a batch of rank `me`, through cells of so many bytes. Messages of one pair are in the order in which
    /// they were issued.
    ///
    /// A message of this rank to itself is copied at once where the batch also receives it. `ahead` says how many messages to
    /// itself it has sent through its ring and not received yet; it is negative where receives came first.
    ///
    /// # Panics
    /// When a cell has no bytes.
    pub fn new(me: Rank, messages: &[Message], cell: usize, ahead: i64) -> Result<Rounds, ToSelfError> {
        Rounds::through(me, messages, |_| cell, ahead)
    }

    /// As [`Rounds::new`], where the cells of the rings to and from each peer have a length of their own.
    ///
    /// # Panics
    /// When a cell has no bytes.
    pub fn through(
        me: Rank,
        messages: &[Message],
        cell: impl Fn(Rank) -> usize,
        ahead: i64,
    ) -> Result<Rounds, ToSelfError> {
        let mut lowering = Lowering { me, rounds: Rounds::default() };
        let mut messages = lowering.take_own(messages, &cell, ahead)?;
        // Every rank begins with another peer, so that the messages to one rank, and those from it, are spread over the round.
        messages.sort_by_key(|Message { peer, direction, .. }| match direction {
            Direction::Send => (Direction::Send, peer.0.wrapping_sub(me.0)),
            Direction::Receive => (Direction::Receive, me.0.wrapping_sub(peer.0)),
        });
        let pairs = messages.chunk_by(|message, next| (message.peer, message.direction) == (next.peer, next.direction));
        let (mut sends, mut receives): (Vec<Pair<'_>>, Vec<Pair<'_>>) =
            pairs.map(|messages| Pair::new(messages, &cell)).partition(|pair| pair.flow.direction == Direction::Send);
        let mut chunks = Vec::new();
        while !(sends.is_empty() && receives.is_empty()) {
            lowering.advance(&mut sends, &mut chunks);
            lowering.send(&chunks);
            lowering.advance(&mut receives, &mut chunks);
            lowering.receive(&chunks);
        }
        Ok(lowering.rounds)
    }
}

/// The messages of an all_to_all: blocks of tensor 0 to all ranks and blocks of tensor 1 from them, of so many elements.
pub fn all_to_all(sent: &Counts, received: &Counts, element: usize) -> Vec<Message> {
    let blocks = |direction, tensor, counts: &Counts| {
        let mut offset = 0;
        let block = |(peer, count): (usize, usize)| {
            let part = TensorPart { tensor, offset, len: count * element };
            offset += part.len;
            Message { peer: Rank::from(peer), direction, part }
        };
        counts.iter().enumerate().map(block).collect::<Vec<_>>()
    };
    let mut messages = blocks(Direction::Send, 0, sent);
    messages.extend(blocks(Direction::Receive, 1, received));
    messages
}

/// What is left of the messages of one pair and direction.
struct Pair<'a> {
    messages: &'a [Message],
    /// How much of the first one has been taken.
    taken: usize,
    /// The bytes of a cell.
    cell: usize,
    /// What has been taken.
    flow: Flow,
}

impl<'a> Pair<'a> {
    fn new(messages: &'a [Message], cell: impl Fn(Rank) -> usize) -> Pair<'a> {
        let Message { peer, direction, .. } = messages[0];
        let cell = cell(peer);
        assert!(cell > 0, "chunks without bytes");
        Pair { messages, cell, taken: 0, flow: Flow { peer, direction, published: 0, chunks: 0 } }
    }

    /// Takes the next chunk, or message without data.
    fn take(&mut self) -> Option<Chunk> {
        let TensorPart { tensor, offset, len } = self.messages.first()?.part;
        let part = TensorPart { tensor, offset: offset + self.taken, len: self.cell.min(len - self.taken) };
        self.taken += part.len;
        if self.taken == len {
            (self.messages, self.taken) = (&self.messages[1..], 0);
        }
        self.flow.published += 1;
        let chunk = Chunk { peer: self.flow.peer, part, number: self.flow.published, index: self.flow.chunks };
        self.flow.chunks += u64::from(part.len > 0);
        Some(chunk)
    }
}

/// What a round moves for one pair and direction.
struct Chunk {
    peer: Rank,
    /// Empty if it is a message without data.
    part: TensorPart,
    /// Its number in the head, from 1.
    number: u64,
    /// Its number among the chunks, from 0.
    index: u64,
}

impl Chunk {
    fn has_data(&self) -> bool {
        self.part.len > 0
    }
}

/// A batch being written.
struct Lowering {
    me: Rank,
    rounds: Rounds,
}

impl Lowering {
    /// Copies messages to this rank itself that the batch also receives. Returns those that go through a ring.
    fn take_own(
        &mut self,
        messages: &[Message],
        cell: impl Fn(Rank) -> usize,
        ahead: i64,
    ) -> Result<Vec<Message>, ToSelfError> {
        let (own, mut others): (Vec<Message>, Vec<Message>) =
            messages.iter().partition(|message| message.peer == self.me);
        let (sent, received): (Vec<Message>, Vec<Message>) =
            own.iter().partition(|message| message.direction == Direction::Send);
        // The oldest messages meet those of earlier batches.
        let earlier = |count: i64| usize::try_from(count).unwrap_or(0);
        let (first_sent, first_received) = (earlier(-ahead).min(sent.len()), earlier(ahead).min(received.len()));
        let (early_sent, sent) = sent.split_at(first_sent);
        let (early_received, received) = received.split_at(first_received);
        for (sent, received) in sent.iter().zip(received) {
            let (from, into) = (sent.part, received.part);
            if from.len != into.len {
                return Err(ToSelfError::Lengths { sent: from.len, received: into.len });
            }
            if from.len > 0 {
                let copy = StreamOperation::Copy { from: CopyEnd::Tensor(from), into: CopyEnd::Tensor(into) };
                self.rounds.operations.push(copy);
            }
        }
        let met = sent.len().min(received.len());
        let (late_sent, late_received) = (&sent[met..], &received[met..]);
        let kept = others.len();
        others.extend([early_sent, late_sent, early_received, late_received].into_iter().flatten());
        if let Some(long) = others[kept..].iter().find(|message| message.part.len > cell(self.me)) {
            return Err(ToSelfError::TooLong { bytes: long.part.len, cell: cell(self.me) });
        }
        let count = early_sent.len() + late_sent.len();
        let messages = ahead + count as i64;
        match count > 0 && messages > CELLS as i64 {
            true => Err(ToSelfError::TooMany { messages }),
            false => Ok(others),
        }
    }

    /// Takes the next chunk of every pair, and drops the pairs that have none left.
    fn advance(&mut self, pairs: &mut Vec<Pair<'_>>, chunks: &mut Vec<Chunk>) {
        chunks.clear();
        pairs.retain_mut(|pair| {
            chunks.extend(pair.take());
            if pair.messages.is_empty() {
                self.rounds.flows.push(pair.flow);
            }
            !pair.messages.is_empty()
        });
    }

    /// All credits, then all copies, then all words: so a round's sends are two calls of the driver beside the copies.
    fn send(&mut self, chunks: &[Chunk]) {
        let with_data = || chunks.iter().filter(|chunk| chunk.has_data());
        for chunk in with_data() {
            self.word(RingWord::Credit { to: chunk.peer, chunk: chunk.index });
        }
        for Chunk { peer, part, index, .. } in with_data() {
            let into = CopyEnd::Cell { peer: *peer, direction: Direction::Send, chunk: *index, len: part.len };
            self.rounds.operations.push(StreamOperation::Copy { from: CopyEnd::Tensor(*part), into });
        }
        for chunk in chunks {
            self.word(RingWord::Publish { to: chunk.peer, number: chunk.number });
        }
    }

    /// Waits, copies, releases: short chunks together, and long ones each for itself, so that their cells are free early.
    fn receive(&mut self, chunks: &[Chunk]) {
        let mut first = 0;
        for (last, chunk) in chunks.iter().enumerate() {
            if chunk.part.len > SHORT_BYTES || last + 1 == chunks.len() {
                self.receive_together(&chunks[first..=last]);
                first = last + 1;
            }
        }
    }

    fn receive_together(&mut self, chunks: &[Chunk]) {
        let with_data = || chunks.iter().filter(|chunk| chunk.has_data());
        for chunk in chunks {
            self.word(RingWord::Await { from: chunk.peer, number: chunk.number });
        }
        for Chunk { peer, part, index, .. } in with_data() {
            let from = CopyEnd::Cell { peer: *peer, direction: Direction::Receive, chunk: *index, len: part.len };
            self.rounds.operations.push(StreamOperation::Copy { from, into: CopyEnd::Tensor(*part) });
        }
        for chunk in with_data() {
            self.word(RingWord::Release { from: chunk.peer, chunk: chunk.index });
        }
    }

    fn word(&mut self, word: RingWord) {
        self.rounds.operations.push(StreamOperation::Word(word));
    }
}
