//! Replays repeated work as CUDA graphs, so that the host prepares its launches once.
//!
//! A stream holds commands back and issues them in passages: a number of commands at a time, or those held when a copy, an
//! event or the host comes. The second time a passage comes, it is captured as a graph, and from then on one call launches it.
//! If only arguments of our own kernels differ (a seed, a rate, borders of documents), the graph's nodes get the new ones. The
//! arguments of the libraries' kernels are unknown here, so any other difference, such as an address of a product's operand,
//! makes another passage, whose commands are issued one by one until it has come twice, too. Callers need not know of it: the
//! same kernels run with the same arguments.

mod commands;
mod graph;

use std::collections::HashMap;

use cudarc::driver::sys;

use super::attention::AttentionCall;
use super::product::ProductCall;
use super::stream::Shape;
use commands::Commands;
use graph::Graph;

/// Counts of a device's commands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replays {
    /// Launches of graphs, and the commands in them.
    pub graphs: u64,
    pub commands_in_graphs: u64,
    /// Commands issued one by one.
    pub commands_alone: u64,
    /// Kernels whose arguments were changed in their graph.
    pub changed: u64,
    pub captured: u64,
    /// The driver's message, if graphs were given up.
    pub refusal: Option<String>,
}

impl Replays {
    pub(super) fn add(&mut self, other: &Replays) {
        self.graphs += other.graphs;
        self.commands_in_graphs += other.commands_in_graphs;
        self.commands_alone += other.commands_alone;
        self.changed += other.changed;
        self.captured += other.captured;
        self.refusal = self.refusal.take().or_else(|| other.refusal.clone());
    }
}

/// Passages of fewer commands are not worth a graph.
const LEAST_COMMANDS: usize = 4;
/// The first passage after an interruption is short, because the GPU is idle until it comes; each is twice as long as the one
/// before.
const FIRST_COMMANDS: usize = 16;
const MOST_COMMANDS: usize = 128;
/// Commands of all remembered passages. A step of GPT-2 has about 800.
const MOST_REMEMBERED: usize = 1 << 16;

/// The commands that a stream holds back, and the passages it has seen.
pub(super) struct Replay {
    held: Commands,
    /// The number of commands issued together.
    most_held: usize,
    is_on: bool,
    passages: HashMap<Vec<u64>, Passage>,
    /// Commands of the passages.
    remembered: usize,
    /// Counts passages.
    turn: u64,
    counts: Replays,
    /// The stream's context: the GPU's, or that of a part of it.
    context: sys::CUcontext,
}

struct Passage {
    /// `None` until the passage comes again.
    graph: Option<Graph>,
    commands: usize,
    last_turn: u64,
}

impl Replay {
    /// If it is off, it issues every command immediately.
    pub fn new(is_on: bool, context: sys::CUcontext) -> Replay {
        Replay {
            held: Commands::default(),
            most_held: if is_on { FIRST_COMMANDS } else { 1 },
            is_on,
            passages: HashMap::new(),
            remembered: 0,
            turn: 0,
            counts: Replays::default(),
            context,
        }
    }

    /// Destroys all graphs.
    pub fn forget(&mut self) {
        self.passages.clear();
        self.remembered = 0;
    }

    /// Turns it on or off; passages stay known. After a refusal it stays off.
    ///
    /// # Safety
    /// As for [`Replay::hand_on_all`].
    pub unsafe fn turn(&mut self, on: bool, stream: sys::CUstream) {
        self.is_on = on && self.counts.refusal.is_none();
        // SAFETY: the caller's promise.
        unsafe { self.hand_on_all(stream) };
    }

    pub fn counts(&self) -> &Replays {
        &self.counts
    }

    /// # Safety
    /// The arguments are the kernel's, what they name lives until it has run, and the stream lives and is always the same.
    pub unsafe fn kernel<'a>(
        &mut self,
        function: sys::CUfunction,
        shape: Shape,
        arguments: impl Iterator<Item = &'a [u64]>,
        stream: sys::CUstream,
    ) {
        self.held.add_kernel(function, shape, arguments);
        // SAFETY: the caller's promise.
        unsafe { self.hold(stream) };
    }

    /// # Safety
    /// As for [`Replay::kernel`], of the call's operands.
    pub unsafe fn product(&mut self, call: ProductCall, stream: sys::CUstream) {
        self.held.add_product(call);
        // SAFETY: the caller's promise.
        unsafe { self.hold(stream) };
    }

    /// # Safety
    /// As for [`Replay::kernel`], of the call's operands.
    pub unsafe fn attention(&mut self, call: AttentionCall, stream: sys::CUstream) {
        self.held.add_attention(call);
        // SAFETY: the caller's promise.
        unsafe { self.hold(stream) };
    }

    /// # Safety
    /// As for [`Replay::kernel`], of the bytes.
    pub unsafe fn set_bytes(&mut self, address: u64, value: u8, bytes: u64, stream: sys::CUstream) {
        self.held.add_set_bytes(address, value, bytes);
        // SAFETY: the caller's promise.
        unsafe { self.hold(stream) };
    }

    /// # Safety
    /// As for everything that is held.
    unsafe fn hold(&mut self, stream: sys::CUstream) {
        if self.held.len() >= self.most_held {
            // SAFETY: the caller's promise.
            unsafe { self.hand_on(stream) };
            if self.is_on {
                self.most_held = (2 * self.most_held).min(MOST_COMMANDS);
            }
        }
    }

    /// Issues all held commands, before something else. Panics with the message of a failed command.
    ///
    /// # Safety
    /// Operands of held commands live until they have run; the stream lives and its context is current.
    pub unsafe fn hand_on_all(&mut self, stream: sys::CUstream) {
        if self.held.len() > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.hand_on(stream) };
        }
        self.most_held = if self.is_on { FIRST_COMMANDS } else { 1 };
    }

    /// # Safety
    /// As for [`Replay::hand_on_all`].
    unsafe fn hand_on(&mut self, stream: sys::CUstream) {
        // A panic below fails the device, so the held commands are never issued.
        let mut held = std::mem::take(&mut self.held);
        // SAFETY: the caller's promise.
        unsafe {
            let replayed = self.replay(&mut held, stream).unwrap_or_else(|why| {
                self.stop(why, stream);
                false
            });
            if !replayed {
                for index in 0..held.len() {
                    held.issue(index, stream).unwrap_or_else(|error| panic!("{error}"));
                }
                self.counts.commands_alone += held.len() as u64;
            }
        }
        held.clear();
        self.held = held;
    }

    /// Whether the commands were launched as a graph. After an error none was issued.
    ///
    /// # Safety
    /// As for [`Replay::hand_on_all`].
    unsafe fn replay(&mut self, held: &mut Commands, stream: sys::CUstream) -> Result<bool, String> {
        let commands = held.len();
        if !self.is_on || commands < LEAST_COMMANDS {
            return Ok(false);
        }
        self.turn += 1;
        let Some(passage) = self.passages.get_mut(held.identity()) else {
            // SAFETY: the caller's promise.
            unsafe { self.make_room(commands, stream) };
            let passage = Passage { graph: None, commands, last_turn: self.turn };
            self.passages.insert(held.identity().to_vec(), passage);
            self.remembered += commands;
            return Ok(false);
        };
        passage.last_turn = self.turn;
        let graph = match &mut passage.graph {
            Some(graph) => graph,
            none => {
                self.counts.captured += 1;
                // SAFETY: the caller's promise.
                none.insert(unsafe { Graph::capture(held, stream, self.context)? })
            }
        };
        // SAFETY: the caller's promise.
        self.counts.changed += unsafe { graph.launch(held, stream)? };
        self.counts.graphs += 1;
        self.counts.commands_in_graphs += commands as u64;
        Ok(true)
    }

    /// Forgets the least recently used passages, if there are too many.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn make_room(&mut self, commands: usize, stream: sys::CUstream) {
        if self.remembered + commands <= MOST_REMEMBERED {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { wait_for(stream) };
        let mut turns: Vec<u64> = self.passages.values().map(|passage| passage.last_turn).collect();
        turns.sort_unstable();
        let middle = turns[turns.len() / 2];
        self.passages.retain(|_, passage| passage.last_turn > middle);
        self.remembered = self.passages.values().map(|passage| passage.commands).sum();
    }

    /// No graphs from here on: they only save time.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn stop(&mut self, why: String, stream: sys::CUstream) {
        // SAFETY: the caller's promise.
        unsafe { wait_for(stream) };
        self.is_on = false;
        self.most_held = 1;
        self.remembered = 0;
        self.passages.clear();
        self.counts.refusal = Some(why);
    }
}

/// Waits until graphs have run, so that they can be freed. The next wait reports errors of the stream.
///
/// # Safety
/// The stream lives.
unsafe fn wait_for(stream: sys::CUstream) {
    // SAFETY: the caller's promise.
    let _ = unsafe { sys::cuStreamSynchronize(stream) };
}
