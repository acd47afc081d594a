//! A GPU that stops in the middle of its work: the driver refuses every call from then on, as it does when a GPU is lost.

#[path = "support/device.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::sys;
use evenkeel_device::DType;

/// A kernel that traps, which ends its context.
const TRAP: &std::ffi::CStr = c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry stop() { trap; ret; }\n";

#[test]
fn a_gpu_that_stops_is_told_at_the_next_wait_and_ever_after_and_can_be_let_go() {
    if !support::on_cuda() {
        println!("skipped: no CUDA device");
        return;
    }
    let device = support::device(1, 1 << 20);
    let tensor = device.compute().floats(1, 4, DType::F32, &[1.0; 4]);
    device.compute().finish();
    stop_the_gpu();

    for what in ["the first wait", "a later one"] {
        let panic = catch_unwind(AssertUnwindSafe(|| device.compute().read(&tensor)));
        let panic = panic.expect_err("nothing can be read from a GPU that has stopped");
        let message = panic.downcast_ref::<String>().expect("a message");
        for words in ["CUDA_ERROR", "hint: "] {
            assert!(message.contains(words), "{what} says {message:?}, which lacks {words:?}");
        }
        println!("{what}: {message}");
    }
    drop(device);
}

fn stop_the_gpu() {
    let succeeded = |result| assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: the device has made its context current on this thread and holds it; the module outlives the launch, for nothing
    // unloads it.
    unsafe {
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        succeeded(sys::cuModuleLoadData(&mut module, TRAP.as_ptr().cast()));
        succeeded(sys::cuModuleGetFunction(&mut function, module, c"stop".as_ptr()));
        let (stream, none) = (std::ptr::null_mut(), std::ptr::null_mut());
        succeeded(sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, none, none));
        assert_ne!(sys::cuCtxSynchronize(), sys::CUresult::CUDA_SUCCESS, "it stops");
    }
}
