//! A stream's commands as data that can be compared, issued and captured.

use std::ffi::c_void;
use std::ops::Range;

use cudarc::driver::sys;

use super::super::attention::AttentionCall;
use super::super::error::describe;
use super::super::product::ProductCall;
use super::super::stream::Shape;

/// Commands in their order.
#[derive(Clone, Default)]
pub(super) struct Commands {
    list: Vec<Command>,
    /// The parts that a graph cannot change: the kernels, and everything given to the libraries. Commands with equal identities
    /// differ at most in the arguments and shapes of our own kernels.
    identity: Vec<u64>,
    /// The arguments of our own kernels, one after the other.
    words: Vec<u64>,
    /// The index in `words` where each argument begins.
    places: Vec<usize>,
}

#[derive(Clone)]
enum Command {
    Kernel(KernelCall),
    Product(ProductCall),
    Attention(AttentionCall),
    SetBytes { address: u64, value: u8, bytes: u64 },
}

/// One of our own kernels.
#[derive(Clone, PartialEq)]
pub(super) struct KernelCall {
    function: sys::CUfunction,
    pub shape: Shape,
    /// In `places`, and in `words`.
    arguments: Range<usize>,
    words: Range<usize>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for KernelCall {}

impl KernelCall {
    /// A kernel's parameters for a graph's node, with [`pointers`](Commands::pointers), which must outlive their use.
    pub fn node_parameters(&self, pointers: &mut [*mut c_void; MOST_ARGUMENTS]) -> sys::CUDA_KERNEL_NODE_PARAMS {
        let ([gx, gy, gz], [tx, ty, tz]) = (self.shape.blocks, self.shape.threads);
        sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: tx,
            blockDimY: ty,
            blockDimZ: tz,
            sharedMemBytes: self.shape.shared_bytes,
            kernelParams: pointers.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        }
    }
}

/// More than any kernel of ours has.
const MOST_ARGUMENTS: usize = 32;

impl Commands {
    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn identity(&self) -> &[u64] {
        &self.identity
    }

    pub fn clear(&mut self) {
        self.list.clear();
        self.identity.clear();
        self.words.clear();
        self.places.clear();
    }

    pub fn add_kernel<'a>(
        &mut self,
        function: sys::CUfunction,
        shape: Shape,
        arguments: impl Iterator<Item = &'a [u64]>,
    ) {
        let (first_place, first_word) = (self.places.len(), self.words.len());
        for argument in arguments {
            self.places.push(self.words.len());
            self.words.extend_from_slice(argument);
        }
        let (arguments, words) = (first_place..self.places.len(), first_word..self.words.len());
        assert!(arguments.len() <= MOST_ARGUMENTS, "{} arguments of a kernel", arguments.len());
        // The number of words keeps neighbouring commands distinct.
        self.identity.extend([1, function as u64, words.len() as u64]);
        self.list.push(Command::Kernel(KernelCall { function, shape, arguments, words }));
    }

    pub fn add_product(&mut self, call: ProductCall) {
        self.identity.push(2);
        self.identity.extend(call.identity());
        self.list.push(Command::Product(call));
    }

    pub fn add_attention(&mut self, call: AttentionCall) {
        self.identity.extend([3, call.operands().len() as u64]);
        self.identity.extend(call.identity());
        self.identity.extend(call.operands());
        self.list.push(Command::Attention(call));
    }

    pub fn add_set_bytes(&mut self, address: u64, value: u8, bytes: u64) {
        self.identity.extend([4, address, value.into(), bytes]);
        self.list.push(Command::SetBytes { address, value, bytes });
    }

    /// Issues one command.
    ///
    /// # Safety
    /// The command's operands live until it has run, and the stream lives.
    pub unsafe fn issue(&self, index: usize, stream: sys::CUstream) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.list[index] {
                Command::Kernel(call) => {
                    let mut pointers = self.pointers(call);
                    let ([gx, gy, gz], [tx, ty, tz]) = (call.shape.blocks, call.shape.threads);
                    let (shared, parameters, no_extra) =
                        (call.shape.shared_bytes, pointers.as_mut_ptr(), std::ptr::null_mut());
                    let result = sys::cuLaunchKernel(
                        call.function,
                        gx,
                        gy,
                        gz,
                        tx,
                        ty,
                        tz,
                        shared,
                        stream,
                        parameters,
                        no_extra,
                    );
                    told(result, || format!("launching `{}` as {:?}", name_of(call.function), call.shape))
                }
                Command::Product(call) => call.issue(stream),
                Command::Attention(call) => call.issue(),
                Command::SetBytes { address, value, bytes } => {
                    let result = sys::cuMemsetD8Async(*address, *value, *bytes as usize, stream);
                    told(result, || "setting memory".to_owned())
                }
            }
        }
    }

    /// Our own kernel, if the command is one.
    pub fn kernel(&self, index: usize) -> Option<&KernelCall> {
        match &self.list[index] {
            Command::Kernel(call) => Some(call),
            _ => None,
        }
    }

    /// Whether a kernel of ours has the same arguments and shape in both, which have the same identity.
    pub fn is_unchanged(&self, call: &KernelCall, other: &Commands, other_call: &KernelCall) -> bool {
        call.shape == other_call.shape && self.words[call.words.clone()] == other.words[other_call.words.clone()]
    }

    /// An array, since a vector would be allocated for each launch.
    pub fn pointers(&self, call: &KernelCall) -> [*mut c_void; MOST_ARGUMENTS] {
        let mut pointers = [std::ptr::null_mut(); MOST_ARGUMENTS];
        for (pointer, place) in pointers.iter_mut().zip(&self.places[call.arguments.clone()]) {
            // The driver only reads them.
            *pointer = std::ptr::from_ref(&self.words[*place]).cast_mut().cast();
        }
        pointers
    }
}

pub(super) fn told(result: sys::CUresult, what: impl FnOnce() -> String) -> Result<(), String> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        result => Err(format!("{}: {}", what(), describe(result))),
    }
}

fn name_of(function: sys::CUfunction) -> String {
    let mut name = std::ptr::null();
    // SAFETY: the function's module is never let go, nor is its name.
    unsafe {
        match sys::cuFuncGetName(&mut name, function) {
            sys::CUresult::CUDA_SUCCESS if !name.is_null() => {
                std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned()
            }
            _ => "a kernel".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(number: usize) -> sys::CUfunction {
        std::ptr::without_provenance_mut(number)
    }

    /// Kernels by number, each with arguments of such words.
    fn commands(kernels: &[(usize, &[&[u64]])], bytes_set: u64) -> Commands {
        let mut commands = Commands::default();
        for (number, arguments) in kernels {
            commands.add_kernel(function(*number), Shape::linear(3, 32), arguments.iter().copied());
        }
        commands.add_set_bytes(64, 0xff, bytes_set);
        commands
    }

    #[test]
    fn commands_that_differ_in_arguments_of_our_kernels_alone_have_one_identity() {
        let base = commands(&[(8, &[&[1], &[2, 3]]), (9, &[&[4]])], 16);
        let cases = [
            (commands(&[(8, &[&[1], &[2, 3]]), (9, &[&[4]])], 16), true),
            (commands(&[(8, &[&[7], &[2, 9]]), (9, &[&[5]])], 16), true),
            (commands(&[(9, &[&[1], &[2, 3]]), (9, &[&[4]])], 16), false),
            (commands(&[(8, &[&[1], &[2, 3]]), (9, &[&[4, 5]])], 16), false),
            (commands(&[(8, &[&[1], &[2, 3]])], 16), false),
            (commands(&[(8, &[&[1], &[2, 3]]), (9, &[&[4]])], 17), false),
        ];
        for (number, (other, is_same)) in cases.iter().enumerate() {
            assert_eq!(base.identity() == other.identity(), *is_same, "case {number}");
        }
    }

    #[test]
    fn each_kernel_is_given_pointers_to_its_own_arguments_and_compared_by_them() {
        let before = commands(&[(8, &[&[1], &[2, 3]]), (9, &[&[4]])], 16);
        let after = commands(&[(8, &[&[1], &[2, 3]]), (9, &[&[5]])], 16);
        let read = |commands: &Commands, index: usize, argument: usize| {
            let call = commands.kernel(index).expect("a kernel");
            // SAFETY: the pointer is to a word of the commands.
            unsafe { commands.pointers(call)[argument].cast::<u64>().read() }
        };
        assert_eq!([read(&after, 0, 0), read(&after, 0, 1), read(&after, 1, 0)], [1, 2, 5]);
        assert!(before.kernel(2).is_none(), "set bytes are no kernel");
        let unchanged = [0, 1].map(|index| {
            let (old, new) = (before.kernel(index).expect("a kernel"), after.kernel(index).expect("a kernel"));
            before.is_unchanged(old, &after, new)
        });
        assert_eq!(unchanged, [true, false]);
    }
}
