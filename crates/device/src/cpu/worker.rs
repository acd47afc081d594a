//! The queues of a CPU device: a worker thread each, fed through a bounded channel.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use half::bf16;

use super::features;
use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::memory::Memory;
use super::team::Team;
use crate::kernel::Kernel;
use crate::queue::{Backend, Event, Health, HostData, KernelTime, Lane, Point, Stamp, kernel_panic};
use crate::{DType, View};

/// Commands a queue holds before the host must wait.
const QUEUE_DEPTH: usize = 1024;
/// Bytes staged for the arena before the host must wait: a full queue of commands could hold the whole model once more.
const STAGED_BYTES: u64 = 4 << 20;

/// The cores and the memory of one CPU device.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Names the device's threads.
    pub name: String,
    /// Threads of the compute queue.
    pub threads: usize,
    /// The cores to pin them to, one each; not pinned if empty.
    pub cores: Vec<usize>,
    /// The cores that the comm queue's thread may run on; any of the others if empty.
    pub comm_cores: Vec<usize>,
    /// Address space of the arena; memory is used only as it is touched.
    pub memory_bytes: u64,
}

impl CpuOptions {
    /// `threads` threads and as much memory as the machine has.
    pub fn with_threads(threads: usize) -> CpuOptions {
        let memory_bytes = features::machine_memory_bytes();
        CpuOptions { name: "rank0".to_owned(), threads, cores: Vec::new(), comm_cores: Vec::new(), memory_bytes }
    }
}

/// Checks of a flag before a queue sleeps: a few microseconds. Measured, from the compute queue to the comm queue and back: 9
/// to 17 µs with 0 to 100 checks, on one core and on two, and 18 to 21 µs with 300.
const LOOKS_BEFORE_SLEEP: usize = 100;

/// A flag that goes up once and can be waited for.
#[derive(Debug, Default)]
pub(crate) struct Flag {
    up: AtomicBool,
    /// The number of sleepers. Waking is a system call even without any.
    sleepers: Mutex<usize>,
    raised: Condvar,
}

impl Flag {
    pub fn raised() -> Arc<Flag> {
        Arc::new(Flag { up: AtomicBool::new(true), ..Flag::default() })
    }

    fn raise(&self) {
        // Under the lock, so that no thread falls asleep between its check and its count.
        let sleepers = self.sleepers.lock().expect("no panic under this lock");
        self.up.store(true, Ordering::Release);
        if *sleepers > 0 {
            self.raised.notify_all();
        }
    }

    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    fn wait(&self) {
        for _ in 0..LOOKS_BEFORE_SLEEP {
            if self.is_up() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut sleepers = self.sleepers.lock().expect("no panic under this lock");
        *sleepers += 1;
        while !self.is_up() {
            sleepers = self.raised.wait(sleepers).expect("no panic under this lock");
        }
        *sleepers -= 1;
    }
}

#[expect(clippy::large_enum_variant, reason = "most commands are launches")]
enum Command {
    Launch(Kernel),
    Upload(View, HostData),
    Download(View, SyncSender<HostData>),
    Record(Arc<Flag>),
    Wait(Arc<Flag>),
    Stamp(Stamp),
    Call(Box<dyn FnOnce() + Send>),
}

/// State shared by the workers and the host.
#[derive(Default)]
struct Reports {
    measuring: AtomicBool,
    /// The throttle factor less one, as the bits of an f64: 0 is full speed.
    throttle: AtomicU64,
    /// Bytes of uploads that have not run.
    staged_bytes: AtomicU64,
    times: Mutex<Vec<KernelTime>>,
    /// Once this has failed, nothing runs on any queue.
    health: Health,
}

impl Reports {
    /// The first message stays.
    fn fail(&self, message: String) {
        self.health.fail(message);
    }
}

pub(crate) struct CpuBackend {
    queues: [WorkerQueue; Lane::ALL.len()],
    reports: Arc<Reports>,
    memory: Memory,
}

struct WorkerQueue {
    commands: Option<SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl CpuBackend {
    pub fn start(options: &CpuOptions) -> std::io::Result<CpuBackend> {
        assert!(options.threads > 0, "a device has at least one thread");
        features::ceiling()?;
        features::enable_tiles();
        let reports = Arc::new(Reports::default());
        let memory = Memory::reserve(options.memory_bytes)?;
        // A compute thread has a core of its own; the comm thread uses none of another rank's.
        let each_alone: Vec<Vec<usize>> = options.cores.iter().map(|&core| vec![core]).collect();
        let of_comm = if options.comm_cores.is_empty() { &options.cores } else { &options.comm_cores };
        let any_of_them = if of_comm.is_empty() { Vec::new() } else { vec![of_comm.clone()] };
        let compute = start_worker(format!("{}-compute", options.name), options.threads, each_alone, &reports, true)?;
        let exchanging =
            |name| start_worker(format!("{}-{name}", options.name), 1, any_of_them.clone(), &reports, false);
        Ok(CpuBackend { queues: [compute, exchanging("comm")?, exchanging("pass")?], reports, memory })
    }

    pub fn base_address(&self) -> u64 {
        self.memory.address()
    }

    pub fn measure_kernels(&self, on: bool) {
        self.reports.measuring.store(on, Ordering::Release);
    }

    pub fn throttle(&self, factor: f64) {
        assert!(factor >= 1.0 && factor.is_finite(), "a throttle of {factor}");
        self.reports.throttle.store((factor - 1.0).to_bits(), Ordering::Release);
    }

    pub fn take_kernel_times(&self) -> Vec<KernelTime> {
        std::mem::take(&mut self.reports.times.lock().expect("no panic under this lock"))
    }

    fn send(&self, lane: Lane, command: Command) {
        self.check();
        let commands = self.queues[lane as usize].commands.as_ref().expect("open while the device lives");
        commands.send(command).expect("a worker serves its queue until the device is dropped");
    }

    /// Panics with the message of the kernel that failed, if one did.
    fn check(&self) {
        if let Some(message) = self.reports.health.failure() {
            // The failed thread has printed its message; the panic hook would print it again.
            resume_unwind(Box::new(message.to_owned()));
        }
    }
}

impl Backend for CpuBackend {
    fn launch(&self, lane: Lane, kernel: Kernel) {
        self.send(lane, Command::Launch(kernel));
    }

    fn record(&self, lane: Lane) -> Event {
        let flag = Arc::new(Flag::default());
        self.send(lane, Command::Record(flag.clone()));
        Event(Point::Cpu(flag))
    }

    fn wait(&self, lane: Lane, event: &Event) {
        let Point::Cpu(flag) = &event.0 else { panic!("a CPU's queue cannot wait for a GPU's event") };
        self.send(lane, Command::Wait(flag.clone()));
    }

    fn upload(&self, lane: Lane, view: View, data: HostData) {
        let staged = &self.reports.staged_bytes;
        let before = staged.fetch_add(data.bytes(), Ordering::Relaxed);
        let is_full = before + data.bytes() > STAGED_BYTES;
        self.send(lane, Command::Upload(view, data));
        if is_full {
            self.finish(lane);
        }
    }

    fn download(&self, lane: Lane, view: View) -> HostData {
        let (sender, receiver) = sync_channel(1);
        self.send(lane, Command::Download(view, sender));
        let data = receiver.recv();
        self.check();
        data.expect("a queue that has not failed answers")
    }

    fn stamp(&self, lane: Lane, stamp: Stamp) {
        self.send(lane, Command::Stamp(stamp));
    }

    fn call(&self, lane: Lane, work: Box<dyn FnOnce() + Send>) {
        self.send(lane, Command::Call(work));
    }

    fn finish(&self, lane: Lane) {
        let flag = Arc::new(Flag::default());
        self.send(lane, Command::Record(flag.clone()));
        flag.wait();
        self.check();
    }

    fn health(&self) -> Health {
        self.reports.health.clone()
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        // A panicking host needs no result of its queued work.
        if std::thread::panicking() {
            self.reports.fail("the host panicked".to_owned());
        }
        for queue in &mut self.queues {
            queue.commands = None;
            if let Some(thread) = queue.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

fn start_worker(
    name: String,
    threads: usize,
    cores_of_threads: Vec<Vec<usize>>,
    reports: &Arc<Reports>,
    measured: bool,
) -> std::io::Result<WorkerQueue> {
    let (sender, receiver) = sync_channel(QUEUE_DEPTH);
    let reports = reports.clone();
    let pin = move |index: usize| {
        if let Some(cores) = cores_of_threads.get(index) {
            features::pin_to_cores(cores);
        }
    };
    let team = Team::start(&name, threads, pin.clone())?;
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        pin(0);
        serve(team, receiver, &reports, measured);
    })?;
    Ok(WorkerQueue { commands: Some(sender), thread: Some(thread) })
}

/// Runs commands until the queue is closed. After a failure it only raises events, so that no one waits for ever.
fn serve(mut team: Team, commands: Receiver<Command>, reports: &Reports, measured: bool) {
    for command in commands {
        match command {
            // A writer elsewhere to the source of a packed operand is ordered by an event of this queue.
            Command::Record(flag) => {
                team.forget_operands();
                flag.raise();
            }
            Command::Wait(flag) => {
                flag.wait();
                team.forget_operands();
            }
            // It reads and writes no tensor, so packed operands stay valid.
            Command::Stamp(stamp) => stamp.set(Instant::now()),
            _ if reports.health.failure().is_some() => (),
            command => {
                if !matches!(command, Command::Launch(Kernel::Product(_))) {
                    team.forget_operands();
                }
                let outcome = catch_unwind(AssertUnwindSafe(|| execute(command, &mut team, reports, measured)));
                if let Err(panic) = outcome {
                    reports.fail(kernel_panic(&*panic));
                }
            }
        }
    }
}

/// Makes a kernel slower by useless work after it. A sleeping core would leave its units and its clock to the core that shares
/// them: measured, other ranks became up to a tenth faster.
fn throttle(begun: Instant, excess: f64) {
    let owed = begun.elapsed().mul_f64(excess);
    let begun = Instant::now();
    let mut numbers = [1.0f32; 256];
    while begun.elapsed() < owed {
        numbers.iter_mut().for_each(|number| *number = *number * 0.999 + 0.001);
        std::hint::black_box(&mut numbers);
    }
}

fn execute(command: Command, team: &mut Team, reports: &Reports, measured: bool) {
    match command {
        Command::Launch(kernel) if measured => {
            let start = Instant::now();
            kernel.run_on_cpu(team);
            throttle(start, f64::from_bits(reports.throttle.load(Ordering::Relaxed)));
            if !reports.measuring.load(Ordering::Acquire) {
                return;
            }
            let time = KernelTime { duration: start.elapsed(), kernel };
            reports.times.lock().expect("no panic under this lock").push(time);
        }
        Command::Launch(kernel) => kernel.run_on_cpu(team),
        Command::Upload(view, data) => {
            let bytes = data.bytes();
            upload(view, data);
            reports.staged_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        Command::Download(view, reply) => drop(reply.send(download(view))),
        Command::Call(work) => work(),
        Command::Record(_) | Command::Wait(_) | Command::Stamp(_) => unreachable!("handled by the caller"),
    }
}

fn upload(view: View, data: HostData) {
    match data {
        HostData::Floats(values) => with_element!(view.dtype, E => {
            write_rows(matrix::<E>(&view), values.iter().map(|&value| E::from_f32(value)));
        }),
        HostData::Indices(values) => write_rows(indices(&view), values.into_iter()),
    }
}

fn download(view: View) -> HostData {
    match view.dtype {
        DType::U32 => HostData::Indices(read_rows(indices(&view)).collect()),
        DType::F32 => HostData::Floats(read_rows(matrix::<f32>(&view)).collect()),
        DType::Bf16 => HostData::Floats(read_rows(matrix::<bf16>(&view)).map(bf16::to_f32).collect()),
    }
}

fn write_rows<T>(to: Matrix<T>, values: impl ExactSizeIterator<Item = T>) {
    assert_eq!(values.len(), to.rows * to.cols, "upload of another size");
    for (i, value) in values.enumerate() {
        // SAFETY: inside the matrix, and this queue's order keeps others away.
        unsafe { to.at(i / to.cols, i % to.cols).write(value) };
    }
}

fn read_rows<T: Copy>(from: Matrix<T>) -> impl Iterator<Item = T> {
    // SAFETY: inside the matrix, and this queue's order keeps others away.
    (0..from.rows * from.cols).map(move |i| unsafe { from.at(i / from.cols, i % from.cols).read() })
}
