//! The command line: subcommands and nothing else.

// `terminal` prints: a closed pipe is no panic.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use kernelfleet::judge::{self, runner};
use kernelfleet::local::commands::{self, Failure, Output};
use kernelfleet::local::{run, terminal};
use kernelfleet::operator;
use kernelfleet::pod;
use kernelfleet::sandbox;
use kernelfleet::task::init::Request;

/// A PyTorch module in, a verified faster kernel out. A language model, or the optimiser that is built in, writes CUDA or
/// C++ kernels; every attempt is judged: is it correct, and how much faster than eager PyTorch and torch.compile?
#[derive(Parser)]
#[command(version, arg_required_else_help = true, verbatim_doc_comment, after_help = FIRST)]
struct Cli {
    #[command(subcommand)]
    command: Subcommands,
}

/// What somebody types who has typed nothing yet.
const FIRST: &str = "\
The first three:
  kernelfleet doctor                        what this machine has and what it lacks
  kernelfleet run examples/demo.yaml        kernels for eight PyTorch forms, with a table and a folder of results
  kernelfleet task init --module torch.nn.GELU --shape 4096,4096 -o gelu.py
                                            a task of your own; then: kernelfleet run examples/files.yaml --tasks gelu.py";

#[derive(Subcommand)]
enum Subcommands {
    /// Runs an OptimizationJob on this machine: the very manifest that `kubectl apply` takes
    Run(Run),
    /// Judges a candidate for a task: correct? how much faster?
    Judge(Judge),
    /// Shows what a GPU's hardware counts in each kernel of a candidate, or of the reference; needs NVIDIA's ncu
    Counters {
        /// Task file in KernelBench's form
        #[arg(long, value_name = "FILE")]
        task: PathBuf,
        /// Folder with model_new.py and kernels/; the reference's kernels are counted if nothing is said
        #[arg(long, value_name = "DIR")]
        candidate: Option<PathBuf>,
        /// Arithmetic of the reference
        #[arg(long, value_enum, default_value_t = PrecisionWord::Reference)]
        precision: PrecisionWord,
        #[command(flatten)]
        output: Format,
    },
    /// Task files: check and write them
    #[command(subcommand)]
    Task(Task),
    /// Writes a judged kernel as a Python package that needs PyTorch alone
    Export {
        /// Results of a task: results/<job>/<task>, or what `judge --keep` wrote
        #[arg(long, value_name = "DIR")]
        result: PathBuf,
        /// Folder of the package; its name is the package's
        #[arg(short = 'o', long = "output", value_name = "PACKAGE")]
        package: PathBuf,
    },
    /// Shows a recorded episode, turn by turn
    Replay {
        /// results/<job>/<task>/trajectory.jsonl, or its folder
        trajectory: PathBuf,
        /// Shows results and answers in full
        #[arg(long)]
        full: bool,
    },
    /// Fetches the best kernels of a job that ran in a cluster
    Results {
        /// Name of the OptimizationJob
        job: String,
        /// Its namespace; that of the kubeconfig's context if nothing is said
        #[arg(short, long)]
        namespace: Option<String>,
        /// Results are kept as DIR/<job>/<task>: best/ (model_new.py, kernels/), task.py, verdict.json
        #[arg(short = 'o', long = "output", value_name = "DIR", default_value = "results")]
        folder: PathBuf,
    },
    /// Watches the custom resources of a cluster and carries them out
    Operator(Operator),
    /// What this machine has, what is missing, and how to mend it
    Doctor {
        #[command(flatten)]
        output: Format,
    },
    /// In an agent pod: plays the episode that the pod is for
    Agent(pod::arguments::Agent),
    /// In an agent pod: lays the workspace's tools where nobody can write them
    Seal(pod::arguments::Seal),
    /// In an agent pod: keeps the sandbox that the agent's commands run in
    Sandbox(pod::arguments::Sandbox),
    /// In a gateway pod: one model endpoint for the agents of a namespace
    Gateway(pod::arguments::Gateway),
    /// In a judge pod: judges what the broker has for it
    JudgeWorker(pod::arguments::JudgeWorker),
    /// The broker of a GpuPool: queues evaluations by fair share, hands slices of cards to judges, keeps the ledger
    Broker(kernelfleet::broker::Arguments),
    /// Copies a broker's ledger while the broker runs: a backup
    LedgerCopy {
        /// The ledger
        #[arg(long, value_name = "FILE", default_value = "/var/lib/kernelfleet/ledger.db")]
        ledger: PathBuf,
        /// New file that gets the copy; standard output if nothing is said
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Prints the definitions of the custom resources
    Crds {
        /// Writes them into this folder instead
        #[arg(long, value_name = "DIR")]
        write: Option<PathBuf>,
        /// Writes the API reference into this file instead
        #[arg(long, value_name = "FILE")]
        reference: Option<PathBuf>,
    },
}

/// The role of the operator's pod; the chart starts it. Outside a cluster it uses KUBECONFIG.
#[derive(Args)]
struct Operator {
    /// Image of agents, brokers and gateways; pinned into each Job when that is created
    #[arg(long)]
    image: String,
    /// Image of sandboxes; --image if nothing is said
    #[arg(long, value_name = "IMAGE")]
    sandbox_image: Option<String>,
    /// Image of judges, which has PyTorch and the compilers; --image if nothing is said
    #[arg(long, value_name = "IMAGE")]
    judge_image: Option<String>,
    /// When images are pulled
    #[arg(long, default_value = "IfNotPresent", value_parser = ["Always", "IfNotPresent", "Never"])]
    image_pull_policy: String,
    /// Name of a Secret that images are pulled with, in the namespace of each pod; again for each further one
    #[arg(long, value_name = "SECRET")]
    image_pull_secret: Vec<String>,
    /// The operator's own namespace, where brokers and judges run; its pod's if nothing is said
    #[arg(long)]
    namespace: Option<String>,
    /// The operator's own service account, by which brokers know it
    #[arg(long, value_name = "NAME", default_value = "kernelfleet-operator")]
    service_account: String,
    /// Bound token of the audience kernelfleet-broker, read again for each call
    #[arg(long, value_name = "FILE", default_value = "/var/run/secrets/kernelfleet/broker/token")]
    broker_token_file: PathBuf,
    /// /healthz, /readyz and /metrics
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    listen: std::net::SocketAddr,
    /// Lease that the replicas of the operator agree on
    #[arg(long, value_name = "NAME", default_value = "kernelfleet-operator")]
    lease: String,
    /// Works at once, without a lease: where no other replica can be running
    #[arg(long)]
    no_leader_election: bool,
    /// Reconciliations of one kind at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
}

#[derive(Args)]
struct Format {
    /// What is printed on standard output
    #[arg(short, long, value_enum, default_value_t = FormatWord::Table)]
    output: FormatWord,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatWord {
    Table,
    Json,
}

impl Format {
    fn get(&self) -> Output {
        match self.output {
            FormatWord::Table => Output::Table,
            FormatWord::Json => Output::Json,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceWord {
    /// The GPU if there is one, else the CPU
    Auto,
    Cpu,
    Cuda,
}

impl DeviceWord {
    fn get(self) -> Option<judge::Device> {
        match self {
            Self::Auto => None,
            Self::Cpu => Some(judge::Device::Cpu),
            Self::Cuda => Some(judge::Device::Cuda),
        }
    }
}

#[derive(Args)]
struct Run {
    /// Manifest with an OptimizationJob, and with the ConfigMaps it refers to
    file: PathBuf,
    /// Task files, folders or lists, beside those of the manifest; they are what `taskSet` means here
    #[arg(long, value_name = "PATH", num_args = 1..)]
    tasks: Vec<PathBuf>,
    /// Folder that the paths in lists are relative to
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t = DeviceWord::Auto)]
    device: DeviceWord,
    /// Where results are kept: DIR/<job>/<task>
    #[arg(long, value_name = "DIR", default_value = "results")]
    results: PathBuf,
    /// Forgets earlier results of the same job instead of going on from them
    #[arg(long)]
    fresh: bool,
    #[command(flatten)]
    policy: Model,
    #[command(flatten)]
    output: Format,
}

/// Who writes the kernels, where it isn't the built-in policy.
#[derive(Args)]
#[command(next_help_heading = "Models")]
struct Model {
    /// OpenAI-compatible endpoint that a model is asked at, up to and with its version: http://host:8000/v1
    #[arg(long, value_name = "URL", conflicts_with = "replay")]
    endpoint: Option<String>,
    /// Model of the endpoint; spec.policy.endpoint.model if nothing is said
    #[arg(long, value_name = "NAME", conflicts_with = "replay")]
    model: Option<String>,
    /// File with the endpoint's key; else the variables KERNELFLEET_API_KEY or KERNELFLEET_API_KEY_FILE
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Answers are asked for whole, not as a stream
    #[arg(long)]
    no_stream: bool,
    /// Asks for token ids and log-probabilities and keeps them in the trajectory (vLLM, SGLang)
    #[arg(long)]
    token_ids: bool,
    /// Temperature of the answers; the manifest's or the server's own if nothing is said
    #[arg(long)]
    temperature: Option<f64>,
    /// Most requests a minute of all agents together
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<u32>,
    /// Most tokens a minute of all agents together
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<u32>,
    /// Prices of a million tokens, read and written: 0.5,2
    #[arg(long, value_name = "READ,WRITTEN", value_parser = prices)]
    prices: Option<(f64, f64)>,
    /// Seconds of silence of the endpoint after which an attempt is given up
    #[arg(long, value_name = "SECONDS")]
    silence: Option<u64>,
    /// Most tokens of one answer
    #[arg(long, value_name = "N")]
    reply_tokens: Option<u64>,
    /// Plays recorded answers again: a trajectory.jsonl, or a folder of results with one a task
    #[arg(long, value_name = "PATH")]
    replay: Option<PathBuf>,
}

fn prices(text: &str) -> Result<(f64, f64), String> {
    let price = |t: &str| t.trim().parse::<f64>().ok().filter(|p| p.is_finite() && *p >= 0.0);
    let pair = text.split_once(',').and_then(|(a, b)| Some((price(a)?, price(b)?)));
    pair.ok_or_else(|| format!("`{text}` is not two prices; write 0.5,2"))
}

#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["candidate", "batch"]))]
struct Judge {
    /// Task file in KernelBench's form
    #[arg(long, value_name = "FILE")]
    task: PathBuf,
    /// Folder with model_new.py and kernels/
    #[arg(long, value_name = "DIR")]
    candidate: Option<PathBuf>,
    /// Folder of candidates: every subfolder with a model_new.py, all against the same baselines
    #[arg(long, value_name = "DIR")]
    batch: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t = DeviceWord::Auto)]
    device: DeviceWord,
    /// How candidates run: as a launch plan, in a process of their own as they are (grade `observed`), or whichever their
    /// form asks for; auto on the CPU device and plan on a card if nothing is said
    #[arg(long, value_enum)]
    path: Option<PathWord>,
    /// Lowest grade that counts: with enforced nothing is judged whose verdict would be observed
    #[arg(long, value_enum, default_value_t = GradeWord::Observed)]
    minimum_grade: GradeWord,
    /// Arithmetic of the baselines
    #[arg(long, value_enum, default_value_t = PrecisionWord::Reference)]
    precision: PrecisionWord,
    /// Rule that outputs are compared by; the last two only for tables compared with published ones
    #[arg(long, value_enum, default_value_t = ToleranceWord::Contract)]
    tolerance: ToleranceWord,
    /// Library calls that the candidate may make
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [LibraryWord::Matmul, LibraryWord::Conv])]
    libraries: Vec<LibraryWord>,
    /// Input sets for each parameter set
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(2..=64))]
    inputs: u8,
    /// Judges every candidate anew; without this, one with the plan and images of an earlier one gets that one's verdict
    #[arg(long)]
    no_cache: bool,
    /// Share of remembered verdicts that are judged anew all the same and compared, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = judge::JUDGED_ANEW, value_parser = share, conflicts_with = "no_cache")]
    recheck: f64,
    /// Keeps task, candidate and verdict in this new folder, as `export --result` takes them; of a batch, a folder each in it.
    /// An earlier verdict on the same task is replaced, anything else refused
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    #[command(flatten)]
    output: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum PathWord {
    Plan,
    Process,
    Auto,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum GradeWord {
    Enforced,
    Observed,
}

#[derive(Clone, Copy, ValueEnum)]
enum PrecisionWord {
    Reference,
    Tf32,
    Half,
}

impl PrecisionWord {
    const fn get(self) -> judge::Precision {
        match self {
            Self::Reference => judge::Precision::Reference,
            Self::Tf32 => judge::Precision::Tf32,
            Self::Half => judge::Precision::Half,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum ToleranceWord {
    Contract,
    Kernelbench,
    CudaAgent,
}

#[derive(Clone, Copy, ValueEnum)]
enum LibraryWord {
    Matmul,
    Conv,
    /// No library call at all
    None,
}

#[derive(Subcommand)]
enum Task {
    /// Says whether tasks can be judged, and why not
    Check {
        /// Task files, folders, or lists (.txt with a path a line, .json)
        #[arg(required = true)]
        paths: Vec<PathBuf>,
        /// Folder that the paths in lists are relative to
        #[arg(long, value_name = "DIR")]
        root: Option<PathBuf>,
        #[arg(long, value_enum, default_value_t = DeviceWord::Auto)]
        device: DeviceWord,
        /// Longest that what refuses one task is looked for, seconds
        #[arg(long, default_value_t = 120.0)]
        seconds: f64,
        /// Only what the syntax shows; nothing is run
        #[arg(long = "static")]
        syntax_only: bool,
        #[command(flatten)]
        output: Format,
    },
    /// Writes a task file around a module, of a library or of your own file
    Init {
        /// `torch.nn.GELU`, `package.module:Class`, or a class of your own file: `./layers.py:Gate`
        #[arg(long)]
        module: String,
        /// Shape of a tensor that forward gets, `16,1024`; again for each further one
        #[arg(long, required = true, value_parser = shape)]
        shape: Vec<Shape>,
        /// Element type of the tensors
        #[arg(long, default_value = "float32", value_parser = ["float32", "float16", "bfloat16", "float64", "int64", "int32"])]
        dtype: String,
        /// Arguments of the constructor as Python writes them: `4096, eps=1e-6`
        #[arg(long, default_value = "")]
        arguments: String,
        /// File to write
        #[arg(short = 'o', long = "output", value_name = "FILE")]
        file: PathBuf,
        /// Overwrites the file
        #[arg(long)]
        force: bool,
    },
}

#[derive(Clone)]
struct Shape(Vec<u64>);

fn shape(text: &str) -> Result<Shape, String> {
    text.split(',')
        .map(|n| n.trim().parse::<u64>().map_err(|_| format!("`{n}` is no size; write 16,1024")))
        .collect::<Result<_, _>>()
        .map(Shape)
}

fn share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x| (0.0..=1.0).contains(x))
        .ok_or_else(|| format!("`{text}` is no share; write a number from 0 to 1, such as 0.05"))
}

fn main() -> ExitCode {
    if let Some(status) = inner_role() {
        return status;
    }
    let command = Cli::parse().command;
    log(&command);
    match dispatch(command) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            terminal::err(&format!("kernelfleet: {failure}"));
            ExitCode::from(failure.status())
        }
    }
}

/// Logs to standard error: what a person at a terminal must see, and what a pod does.
fn log(command: &Subcommands) {
    let pod = matches!(
        command,
        Subcommands::Agent(_)
            | Subcommands::JudgeWorker(_)
            | Subcommands::Sandbox(_)
            | Subcommands::Gateway(_)
            | Subcommands::Operator(_)
    );
    let usual = if pod { "info" } else { "warn" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("KERNELFLEET_LOG").unwrap_or_else(|_| usual.into());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::env::var("KERNELFLEET_LOG_FORMAT").is_ok_and(|format| format == "json") {
        builder.json().init();
    } else {
        builder.init();
    }
}

/// Hidden subcommands, started by a judge with a socket on descriptor 3.
fn inner_role() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let command = arguments.first()?;
    let serve: fn(judge::wire::Channel) -> ! = match command.as_str() {
        runner::CPU_COMMAND => runner::cpu::serve,
        runner::CUDA_COMMAND => runner::cuda::serve,
        sandbox::client::COMMAND => return Some(sandbox::keeper::main()),
        runner::cuda::facts::COMMAND => return Some(runner::cuda::facts::main()),
        runner::cuda::selftest::COMMAND => {
            // Where PyTorch isn't found either, the checks that need a library say so.
            let found =
                kernelfleet::local::environment::discover().map(|e| e.toolchain.libraries.named()).unwrap_or_default();
            return Some(runner::cuda::selftest::main(found));
        }
        _ => return None,
    };
    match runner::inherited_channel() {
        Ok(channel) => serve(channel),
        Err(error) => {
            terminal::err(&format!("kernelfleet {command}: {error}"));
            Some(ExitCode::FAILURE)
        }
    }
}

/// Runs a subcommand; its exit status where it ended in order.
fn dispatch(command: Subcommands) -> Result<u8, Failure> {
    let done = match command {
        Subcommands::Agent(agent) => return Ok(pod::run_agent(agent)),
        Subcommands::Seal(seal) => pod::run_seal(&seal),
        Subcommands::Sandbox(sandbox) => pod::run_sandbox(sandbox),
        Subcommands::Gateway(gateway) => pod::run_gateway(gateway),
        Subcommands::JudgeWorker(judge) => pod::run_judge(judge),
        Subcommands::Run(run) => commands::run(&commands::RunArguments {
            file: run.file,
            tasks: run.tasks,
            root: run.root,
            device: run.device.get(),
            results: run.results,
            output: run.output.get(),
            fresh: run.fresh,
            policy: kernelfleet::local::choose::PolicyArguments {
                endpoint: run.policy.endpoint,
                model: run.policy.model,
                key_file: run.policy.key_file,
                no_stream: run.policy.no_stream,
                token_ids: run.policy.token_ids,
                temperature: run.policy.temperature,
                requests_per_minute: run.policy.requests_per_minute,
                tokens_per_minute: run.policy.tokens_per_minute,
                prices: run.policy.prices,
                silence: run.policy.silence,
                reply_tokens: run.policy.reply_tokens,
                replay: run.policy.replay,
            },
        }),
        Subcommands::Judge(judge) => commands::judge(&judge_arguments(judge)),
        Subcommands::Task(Task::Check { paths, root, device, seconds, syntax_only, output }) => {
            commands::check(&commands::CheckArguments {
                paths,
                root,
                device: device.get(),
                r#static: syntax_only,
                seconds,
                output: output.get(),
            })
        }
        Subcommands::Task(Task::Init { module, shape, dtype, arguments, file, force }) => {
            let shapes = shape.into_iter().map(|s| s.0).collect();
            commands::init(&commands::InitArguments {
                request: Request { module, shapes, dtype, arguments },
                file,
                force,
            })
        }
        Subcommands::Counters { task, candidate, precision, output } => {
            commands::counters(&task, candidate.as_deref(), precision.get(), output.get())
        }
        Subcommands::Export { result, package } => commands::export(&result, &package),
        Subcommands::Replay { trajectory, full } => commands::replay(&trajectory, full),
        Subcommands::Results { job, namespace, folder } => {
            // As a run lays them: two jobs with a task of the same name keep apart.
            let folder = run::task_folder(&folder, &job);
            let fetched = operator::fetch::results(&job, namespace.as_deref(), &folder)
                .map_err(|e| Failure::Request(e.to_string()))?;
            for folder in &fetched.folders {
                terminal::out(&folder.display().to_string());
            }
            if fetched.left_out > 0 {
                terminal::err(&format!(
                    "kernelfleet: {} more kernels did not fit into the ConfigMap",
                    fetched.left_out
                ));
            }
            Ok(())
        }
        Subcommands::Operator(role) => {
            operator::run(operator_arguments(role)).map_err(|e| Failure::Fault(e.to_string()))
        }
        Subcommands::Doctor { output } => commands::doctor(output.get()),
        Subcommands::Broker(arguments) => {
            kernelfleet::broker::main(&arguments).map_err(|e| Failure::Fault(e.to_string()))
        }
        Subcommands::LedgerCopy { ledger, to } => {
            kernelfleet::broker::ledger::backup(&ledger, to.as_deref()).map_err(|e| Failure::Fault(e.to_string()))
        }
        Subcommands::Crds { write, reference } => commands::crds(write.as_deref(), reference.as_deref()),
    };
    done.map(|()| 0)
}

fn operator_arguments(role: Operator) -> operator::Arguments {
    let of_pod = || std::fs::read_to_string("/var/run/secrets/kubernetes.io/serviceaccount/namespace").ok();
    let namespace = role.namespace.or_else(of_pod).unwrap_or_else(|| "kernelfleet".into());
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "local".into());
    operator::Arguments {
        settings: operator::context::Settings {
            namespace: namespace.trim().to_owned(),
            service_account: role.service_account,
            sandbox_image: role.sandbox_image.unwrap_or_else(|| role.image.clone()),
            judge_image: role.judge_image.unwrap_or_else(|| role.image.clone()),
            image: role.image,
            pull_policy: role.image_pull_policy,
            pull_secrets: role.image_pull_secret,
        },
        broker_token_file: role.broker_token_file,
        listen: role.listen,
        lease: (!role.no_leader_election).then_some(role.lease),
        identity: format!("{host}_{}", std::process::id()),
        workers: role.workers,
    }
}

fn judge_arguments(judge: Judge) -> commands::JudgeArguments {
    commands::JudgeArguments {
        task: judge.task,
        candidate: judge.candidate,
        batch: judge.batch,
        device: judge.device.get(),
        path: judge.path.map(|word| match word {
            PathWord::Plan => judge::PathChoice::Plan,
            PathWord::Process => judge::PathChoice::Process,
            PathWord::Auto => judge::PathChoice::Auto,
        }),
        enforced: judge.minimum_grade == GradeWord::Enforced,
        precision: judge.precision.get(),
        tolerance: match judge.tolerance {
            ToleranceWord::Contract => judge::Tolerance::Contract,
            ToleranceWord::Kernelbench => judge::Tolerance::Kernelbench,
            ToleranceWord::CudaAgent => judge::Tolerance::CudaAgent,
        },
        libraries: judge
            .libraries
            .iter()
            .filter_map(|l| match l {
                LibraryWord::Matmul => Some("matmul".to_owned()),
                LibraryWord::Conv => Some("conv".to_owned()),
                LibraryWord::None => None,
            })
            .collect(),
        inputs: usize::from(judge.inputs),
        no_cache: judge.no_cache,
        recheck: judge.recheck,
        keep: judge.keep,
        output: judge.output.get(),
    }
}
