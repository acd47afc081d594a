//! Commands as a graph that the driver launches in one call.

use cudarc::driver::sys;

use super::commands::{Commands, told};

pub(super) struct Graph {
    /// Nodes are named by those of the captured graph, so it stays.
    _captured: Captured,
    executable: Executable,
    /// The nodes of our own kernels, by command.
    nodes: Vec<Option<sys::CUgraphNode>>,
    /// The stream's context. It must be the current one for a node to be changed.
    context: sys::CUcontext,
    /// Its present commands.
    commands: Commands,
}

// SAFETY: the driver's handles may be used from any thread, one at a time.
unsafe impl Send for Graph {}

struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: captured once, and destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

struct Executable(sys::CUgraphExec);

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made once, and destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

impl Graph {
    /// Captures the commands without running them. An error leaves the stream as it was.
    ///
    /// # Safety
    /// The commands' operands and the stream live, and the GPU's context is current. `context` is the stream's.
    pub unsafe fn capture(
        commands: &Commands,
        stream: sys::CUstream,
        context: sys::CUcontext,
    ) -> Result<Graph, String> {
        use sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as MODE;
        let mut nodes = Vec::with_capacity(commands.len());
        // SAFETY: the caller's promise; what was begun is ended.
        unsafe {
            told(sys::cuStreamBeginCapture_v2(stream, MODE), || "beginning to capture".to_owned())?;
            let issued = (0..commands.len()).try_for_each(|index| {
                commands.issue(index, stream)?;
                nodes.push(if commands.kernel(index).is_some() { Some(last_node(stream)?) } else { None });
                Ok::<(), String>(())
            });
            let mut captured = std::ptr::null_mut();
            let ended = sys::cuStreamEndCapture(stream, &mut captured);
            let captured = Captured(captured);
            issued?;
            told(ended, || "ending to capture".to_owned())?;
            let mut executable = std::ptr::null_mut();
            let made = sys::cuGraphInstantiateWithFlags(&mut executable, captured.0, 0);
            told(made, || format!("making a graph of {} commands", commands.len()))?;
            let executable = Executable(executable);
            Ok(Graph { _captured: captured, executable, nodes, context, commands: commands.clone() })
        }
    }

    /// Launches the graph with these commands, whose identity is that of its own. Returns the number of nodes changed.
    /// `commands` is used up; after an error nothing was issued and it is unchanged.
    ///
    /// # Safety
    /// As for [`Graph::capture`], until the graph has run.
    pub unsafe fn launch(&mut self, commands: &mut Commands, stream: sys::CUstream) -> Result<u64, String> {
        assert_eq!(self.commands.identity().len(), commands.identity().len(), "other commands than the graph's");
        let mut changed = 0;
        for (index, node) in self.nodes.iter().enumerate() {
            let (&Some(node), Some(old), Some(new)) = (node, self.commands.kernel(index), commands.kernel(index))
            else {
                continue;
            };
            if self.commands.is_unchanged(old, commands, new) {
                continue;
            }
            let mut pointers = commands.pointers(new);
            let parameters = new.node_parameters(&mut pointers);
            // SAFETY: the node is the graph's, its kernel the same; arguments are copied before this returns. Launches that are
            // under way keep theirs.
            let result = unsafe {
                told(sys::cuCtxPushCurrent_v2(self.context), || "entering a stream's context".to_owned())?;
                let result = sys::cuGraphExecKernelNodeSetParams_v2(self.executable.0, node, &parameters);
                sys::cuCtxPopCurrent_v2(&mut std::ptr::null_mut());
                result
            };
            told(result, || "changing a graph".to_owned())?;
            changed += 1;
        }
        // SAFETY: the caller's promise.
        told(unsafe { sys::cuGraphLaunch(self.executable.0, stream) }, || "launching a graph".to_owned())?;
        std::mem::swap(&mut self.commands, commands);
        Ok(changed)
    }
}

/// The node of the last command issued to a stream under capture.
///
/// # Safety
/// The stream lives.
unsafe fn last_node(stream: sys::CUstream) -> Result<sys::CUgraphNode, String> {
    let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut number = 0;
    let mut graph = std::ptr::null_mut();
    let mut nodes = std::ptr::null();
    let mut edges = std::ptr::null();
    let mut count = 0;
    // SAFETY: every pointer is to a variable of the right type; the nodes are read before anything else is issued.
    unsafe {
        let asked = sys::cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            &mut number,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        );
        told(asked, || "asking for a captured kernel".to_owned())?;
        if count != 1 {
            return Err(format!("a captured kernel is followed from {count} nodes, expected 1"));
        }
        Ok(*nodes)
    }
}
