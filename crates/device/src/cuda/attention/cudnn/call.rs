//! A call of a plan with its operands.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cudnn::sys;

use super::descriptor::Refusal;
use super::formulas::Role;
use super::plan::Plan;

#[derive(Clone)]
pub(in super::super::super) struct AttentionCall {
    plan: Arc<Plan>,
    handle: sys::cudnnHandle_t,
    workspace: u64,
    /// By the plan's roles: addresses, or the bits of a number.
    operands: Vec<u64>,
}

// SAFETY: a handle may be used from any thread, one at a time.
unsafe impl Send for AttentionCall {}

impl AttentionCall {
    pub(super) fn new(
        plan: Arc<Plan>,
        handle: sys::cudnnHandle_t,
        workspace: u64,
        operand: impl Fn(Role) -> u64,
    ) -> AttentionCall {
        let operands = plan.roles.iter().map(|(role, _)| operand(*role)).collect();
        AttentionCall { plan, handle, workspace, operands }
    }

    /// Everything given to the library but the operands.
    pub fn identity(&self) -> [u64; 2] {
        [Arc::as_ptr(&self.plan) as u64, self.workspace]
    }

    pub fn operands(&self) -> &[u64] {
        &self.operands
    }

    /// Issues to the handle's stream.
    ///
    /// # Safety
    /// The plan is for these operands, which live until it has run, as does the stream.
    pub unsafe fn issue(&self) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { self.execute() }.map_err(|Refusal(why)| format!("Attention by cuDNN: {why}"))
    }

    /// # Safety
    /// As for [`AttentionCall::issue`].
    pub(super) unsafe fn execute(&self) -> Result<(), Refusal> {
        let numbers: Vec<f32> = self.operands.iter().map(|&bits| f32::from_bits(bits as u32)).collect();
        let roles = self.plan.roles.iter().zip(&self.operands).zip(&numbers);
        let addresses: Vec<*mut c_void> = roles
            .map(|(((role, _), &address), number)| match role.is_number() {
                true => std::ptr::from_ref(number).cast_mut().cast(),
                false => address as *mut c_void,
            })
            .collect();
        // SAFETY: the caller's promise; the numbers are read before this returns.
        unsafe { self.plan.execute(self.handle, self.workspace, &addresses) }
    }
}
