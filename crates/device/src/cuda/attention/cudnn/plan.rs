//! Compiles a formula into a plan that is ready to run.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::cudnn::sys;
use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendDescriptorType_t as Kind;

use super::super::problem::Problem;
use super::descriptor::{Descriptor, Refusal, succeed};
use super::formulas::{Role, formula};

/// The GPU that a plan is made for.
pub(super) enum Target {
    /// The GPU of a handle.
    Gpu(sys::cudnnHandle_t),
    /// A described GPU that need not exist: its plans are never run.
    #[cfg(test)]
    Described(Descriptor),
}

impl Target {
    fn handle(&self) -> Option<sys::cudnnHandle_t> {
        match self {
            Target::Gpu(handle) => Some(*handle),
            #[cfg(test)]
            Target::Described(_) => None,
        }
    }

    /// Gives a descriptor the described GPU.
    #[cfg_attr(not(test), allow(unused_variables))]
    fn describe(&self, descriptor: &mut Descriptor, name: Name) -> Result<(), Refusal> {
        match self {
            Target::Gpu(_) => Ok(()),
            #[cfg(test)]
            Target::Described(properties) => descriptor.set_descriptors(name, &[properties]),
        }
    }
}

/// Configurations tried until one compiles.
const MOST_TRIED: usize = 8;

pub(super) struct Plan {
    descriptor: Descriptor,
    pub roles: Vec<(Role, i64)>,
    has_run: AtomicBool,
    /// Elements of the f32 tensors that only the plan uses.
    pub sums: [(Role, i64); 2],
    pub workspace_bytes: u64,
}

// SAFETY: a finished plan is only read, and run by who has the handle.
unsafe impl Sync for Plan {}

impl Plan {
    /// The best plan by cuDNN's own judgement, or the one in `kept`, as [`Plan::text`] wrote it.
    pub fn new(problem: &Problem, target: &Target, kept: Option<&[u8]>) -> Result<Plan, Refusal> {
        let formula = formula(problem)?;
        let roles = formula.roles.iter().map(|(role, node)| (*role, node.id())).collect();
        let known = kept.and_then(|text| restore(text, target).ok());
        let descriptor = match known {
            Some(descriptor) => descriptor,
            None => compile(formula.graph.finish(target.handle())?, target)?,
        };
        let workspace_bytes = descriptor.integer(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as u64;
        Ok(Plan { descriptor, roles, has_run: AtomicBool::new(false), sums: formula.sums, workspace_bytes })
    }

    /// The plan with its compiled code.
    pub fn text(&self) -> Result<Vec<u8>, Refusal> {
        self.descriptor.text(Name::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// Whether it has run before.
    pub fn has_run(&self) -> bool {
        self.has_run.load(Ordering::Acquire)
    }

    /// Runs the plan on the handle's stream. The addresses are those of its roles, of numbers in the host's memory.
    ///
    /// # Safety
    /// The tensors have the layouts of the plan's problem and live until it has run, the numbers until this returns.
    pub unsafe fn execute(
        &self,
        handle: sys::cudnnHandle_t,
        workspace: u64,
        addresses: &[*mut c_void],
    ) -> Result<(), Refusal> {
        let ids: Vec<i64> = self.roles.iter().map(|(_, id)| *id).collect();
        let mut pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set_integers(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?;
        pack.set_addresses(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, addresses)?;
        pack.set_addresses(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace as *mut c_void])?;
        let pack = pack.finalize()?;
        // SAFETY: the caller's promise.
        succeed("execution", unsafe { sys::cudnnBackendExecute(handle, self.descriptor.raw(), pack.raw()) })?;
        self.has_run.store(true, Ordering::Release);
        Ok(())
    }
}

fn compile(graph: Descriptor, target: &Target) -> Result<Descriptor, Refusal> {
    let mut heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    heuristic.set_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&graph])?;
    heuristic.set_heuristic(sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A)?;
    target.describe(&mut heuristic, Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP)?;
    let heuristic = heuristic.finalize()?;
    let kind = Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    let mut refusal = Refusal("no kernel fits".to_owned());
    for configuration in heuristic.descriptors(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, kind, MOST_TRIED)? {
        let plan = || {
            let mut plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
            plan.set_descriptors(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[&configuration])?;
            target.describe(&mut plan, Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP)?;
            plan.finalize()
        };
        match plan() {
            Ok(plan) => return Ok(plan),
            Err(error) => refusal = error,
        }
    }
    Err(refusal)
}

fn restore(text: &[u8], target: &Target) -> Result<Descriptor, Refusal> {
    let mut plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    if let Some(handle) = target.handle() {
        plan.set_handle(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle)?;
    }
    target.describe(&mut plan, Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP)?;
    plan.set_text(Name::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, text)?;
    plan.finalize()
}
