//! Every code that an error can have, with its exit code and what `remesh explain` says of it. The one place where a code is
//! given an exit code; `docs/errors.md` lists the same.

/// A kind of error.
#[derive(Debug)]
pub(crate) struct Code {
    /// `RM`, the area, three digits.
    pub(crate) code: &'static str,
    /// The process's exit code.
    pub(crate) exit: u8,
    /// What is wrong, in a few words.
    pub(crate) means: &'static str,
    /// What that is, and what to do about it.
    pub(crate) text: &'static str,
}

/// The code of an error that has none: a gap in this table.
pub(crate) const UNKNOWN: &str = "RM9000";

macro_rules! codes {
    ($($code:literal $exit:literal $means:literal $text:literal)*) => {
        /// All codes, ascending.
        pub(crate) const CODES: &[Code] =
            &[$(Code { code: $code, exit: $exit, means: $means, text: $text }),*];
    };
}

codes! {
    "RM1001" 5 "a read or a write failed"
    "The system or the store failed in a way that may pass: a device, a network, an interrupted call. It is safe to run again; \
     checkpoints that were complete stay so."
    "RM1002" 2 "no store is called that"
    "A location is a folder, `file://PATH` or `memory://`. Other schemes are not there."
    "RM1003" 3 "a file is not there"
    "Nothing has the name that was given. Check it for a typing error, and whether the disk is mounted."
    "RM1004" 4 "permission denied"
    "The user of this process may not read or write there, or the file system is mounted read-only. `ls -ld` on the path and the \
     folders above it shows who may."
    "RM1005" 8 "no space is left"
    "The disk or the quota is full, or a file would be larger than the file system takes. What a failed save wrote is removed, and \
     the checkpoint before it is intact: free some space, then run again."
    "RM1006" 3 "something else has that name"
    "A file lies where a folder is needed, a folder, pipe or socket where a file is needed, or symbolic links lead in a circle."
    "RM1007" 2 "the file system does not take that name"
    "The name is too long or has a character that cannot be in one."
    "RM1008" 7 "that name is taken"
    "What was to be made is there already, and is left alone. Give another name, or remove it."
    "RM1009" 8 "no memory is left"
    "The system refused memory. Run with fewer ranks or a smaller model, or give the process more."
    "RM1010" 2 "the file system cannot do that"
    "Checkpoints need links that fail where a name is taken, renames and syncing. Use a folder on a file system that has them."
    "RM1011" 6 "a file holds other bytes than it should"
    "It ends too early, or is not text where text is expected."
    "RM1021" 6 "an `.idx` is not that of a token file"
    "`PREFIX.idx` must be as `remesh data tokenize` or Megatron's preprocessing writes it. Write the pair anew."
    "RM1022" 6 "`.bin` and `.idx` do not belong together"
    "The index counts other bytes than the `.bin` has: one of them is of another run of the tokenizer, or was cut short. Write the \
     pair anew."
    "RM1023" 2 "the data set holds no sample"
    "A sample is `--seq-length` tokens and the one after. Use more text or shorter samples."
    "RM1024" 6 "a token is no id of the vocabulary"
    "The tokens were made with a tokenizer of more ids than `--vocab-size` says. Leave the flag out, or tokenize the text anew."
    "RM1025" 6 "a tokenizer's file cannot be understood"
    "`PREFIX.tokenizer.json` is not what `remesh data tokenize` writes. Write it anew, or remove it and give `--vocab-size`."
    "RM1026" 2 "an epoch holds no global batch"
    "With `--epoch-tail drop` the samples of an epoch that fill no batch are not used; here that would be all of them."
    "RM1027" 6 "a Hugging Face tokenizer cannot be understood"
    "`--tokenizer` takes the `tokenizer.json` of a model; a `tokenizer_config.json` beside it is read for its end token."
    "RM1028" 6 "a document gives no ids"
    "The message names file and line: of JSON lines each is an object with its text under `--json-key`; a Hugging Face tokenizer takes \
     UTF-8 alone."
    "RM1029" 6 "a document is too long"
    "A document of a token file has at most 2³¹ − 1 tokens. Cut it into several, or make a document of each line."
    "RM1030" 2 "token files of different tokenizers"
    "An id has one meaning in a run: what `PREFIX.tokenizer.json` says must be the same for all files of `--data-path`. Tokenize all text \
     with one tokenizer."
    "RM1031" 6 "a Parquet file cannot be read"
    "It is damaged, or its columns are packed in a way that is not understood: Snappy, gzip and Zstandard are. The message has the \
     reader's words."

    "RM2001" 2 "sizes of a layout that do not divide"
    "World size = TP × PP × CP × GTP × DP, weight shards = TP × GTP, sequence shards = SP degree × shards inside GTP; all of them \
     whole numbers of at least 1. The help of the error lists sizes that fit."
    "RM2002" 2 "batch sizes that do not divide"
    "The global batch is a whole number of micro-batches on every rank that reads samples of its own: global batch size ÷ (micro \
     batch size × DP × GTP batch shards)."
    "RM2003" 2 "a layout does not divide the model"
    "A dim of a tensor cannot be cut into equal parts over the ranks that share it; TP must divide the query groups and the widths."
    "RM2004" 2 "a sequence cannot be cut evenly"
    "The sequence length must be a multiple of 2 × runtime CP where that is above 1, and of runtime CP × SP degree."
    "RM2005" 2 "sequence shards need sequence parallelism"
    "With TP above 1 the sequence is cut inside GTP only if it is cut over TP, too: add `--sequence-parallel`."
    "RM2006" 2 "the rank order has no place for sequence shards"
    "The older order `cp-inside-gtp` knows none inside GTP. Leave `--rank-order` out."
    "RM2007" 2 "a number of the layout or batch was not said"
    "It has no default. Give the flag, or the key of the same name in the configuration file."
    "RM2008" 2 "options of the process groups that exclude each other"
    "Several instances of the distributed optimizer need weights that are not gathered before use: one instance, or no GTP."
    "RM2009" 2 "layers do not divide over the pipeline's stages"
    "Say how many layers the first and the last stage have, or give a layout of stages; the help of the error shows one that works."
    "RM2030" 2 "the canonical leaf does not fit the layout"
    "Canonical numerics add token by token in leaves of equal length, which must divide what a rank holds of a sequence. A smaller \
     `--canonical-leaf-tokens` changes the bits of a run, so it is never chosen in silence."
    "RM2031" 2 "TP does not fit canonical numerics"
    "Sums that TP splits run in a fixed tree of a power of two of blocks, the same under every TP: TP must be a power of two up to \
     that number, and the number must divide query groups and feed-forward width."
    "RM2032" 2 "the trainer runs one pipeline stage and no experts"
    "Leave out the sizes of pipeline and experts; weights of a large model are spread by TP and weight shards."
    "RM2050" 8 "the run cannot fit the memory"
    "Weights, gradients, moments, a micro-batch and the ranks themselves need more than the machine or its container has, whatever \
     else is needed. Nothing was allocated. Often a size has a digit too many."

    "RM3001" 2 "the checkpoint is of a run with other settings"
    "Every difference is listed with both values. Shapes cannot change; what else is meant may pass by `--allow-change NAME,…`."
    "RM3102" 2 "random streams of these coordinates are not in the checkpoint"
    "`--rng-policy strict` asks for the saved streams, which exist under the saved layout alone. `derive` starts them anew; dropout \
     and data order do not depend on them."
    "RM3103" 6 "a cell of random streams is none"
    "Its words are not those of a stream. `remesh verify` checks the files; `--rng-policy derive` starts the streams anew."
    "RM3104" 6 "the random streams do not fit the layout that saved them"
    "There must be one cell for each rank of the saved layout. `--no-load-rng` starts the streams anew."
    "RM3105" 6 "random numbers or counters that cannot go on"
    "The checkpoint names another generator, seed or position than its run would have: another program wrote it, or somebody \
     changed it and sealed it again."
    "RM3110" 1 "the resume is proved less far than `--strict` asks for"
    "`--strict` asks for level L2: state, next samples and random streams. Resume under the saved layout, or leave it out."
    "RM3111" 1 "the first step is not the saved run's"
    "Under `--strict` the first step after a resume must have the loss, gradient norm and learning rate that `metrics.jsonl` has for \
     it, bit for bit. Other data, another program or another machine's matrix products can be the reason."
    "RM3200" 70 "another rank failed first"
    "The error of that rank is the cause."
    "RM3201" 1 "steps were not finite"
    "So many steps in a row had a loss or gradients that are not finite or out of range that the run ended; none of them updated \
     anything, and the last save is intact. A lower rate, a longer warm-up or a smaller `--clip-grad` may help."
    "RM3202" 8 "a rank got no thread"
    "Ranks are threads of one process, and the system gave no more. Run with fewer ranks, or raise its limits."
    "RM3203" 70 "a device failed"
    "The device's words say what failed."
    "RM3204" 5 "a rank did not answer in time"
    "It was too busy, or its disk too slow. Run again, with a longer `--distributed-timeout-minutes`."
    "RM3205" 1 "the state is not finite"
    "An update made an element of the weights or moments NaN or infinite, although the gradients were finite. Such a state is never \
     saved, and as no later one would be better, the run ends; the checkpoint before is intact. A lower rate or a longer warm-up may \
     help."
    "RM3206" 5 "the processes of a job did not meet"
    "Rank 0 listens on MASTER_PORT, behind torchrun on one of the sixteen ports after it, and all others come to MASTER_ADDR. The error \
     says what was tried."
    "RM3207" 2 "processes were started differently"
    "Each rank that is a process reads flags and files and finds its checkpoint by itself; all must come to the same."
    "RM3208" 5 "a rank's process is gone"
    "It was ended from outside, as the system does where memory is short, its machine is gone, or the network between them. It is safe \
     to run again: the run goes on from the last save. Where it happens again, the log of the rank's machine says why."

    "RM4001" 6 "a pickle names what runs code"
    "Nothing was executed. Such a name stands in no checkpoint that torch's own functions write: do not load the file with other \
     programs either, unless you trust who made it."
    "RM4002" 6 "a pickle cannot be read"
    "It ends early, breaks a rule of its format, or goes beyond a limit. The copy may be incomplete; fetch or save it again."
    "RM4003" 6 "files of other software contradict themselves, or are not supported"
    "The message names the file, the tensor and what is wrong. The copy may be incomplete; fetch or save it again."
    "RM4004" 6 "the format of a file is not known"
    "docs/formats.md lists what is read."
    "RM4012" 3 "there is no such checkpoint"
    "The folder, or the step in it, is not there. `remesh ls RUN` lists the steps that are."
    "RM4020" 6 "a step is incomplete"
    "It has no `checkpoint.json`, or files that it lists are missing or have another size: a save that was cut off, or files that \
     were lost. `RUN@latest` takes the newest whole step; `remesh verify` lists what is lost."
    "RM4021" 6 "a checkpoint is damaged"
    "Checksums, tables or fingerprints are not those that were written. `remesh verify` lists all that is lost; an older step may be \
     whole."
    "RM4022" 6 "a newer version of the format"
    "A newer program saved it. It may be whole, so it is neither passed over nor replaced: update this program, or name an older step."
    "RM4023" 6 "a file of a checkpoint is a symbolic link"
    "Files of a checkpoint must lie in its folder. What the link leads to may be whole, so the step is neither passed over nor \
     replaced: copy the file itself there."
    "RM4024" 6 "no checkpoint of a run is whole"
    "There are steps, and each of them is incomplete or damaged; all are listed with the reason. No run starts afresh over checkpoints \
     that were complete once: save to another folder, or move them away."
    "RM4025" 6 "a step was set aside"
    "`--overwrite` replaced it, or it was damaged when its step was saved again: its `checkpoint.json` was renamed, its data stays. \
     Renaming the commit back makes it a checkpoint again; nothing else uses those files."
    "RM4030" 2 "the state cannot be saved as its placement says"
    "Main replicas must hold every element exactly once. A program that saves its own state has declared a placement that its \
     process groups do not make."
    "RM4031" 2 "the checkpoint does not fit the model"
    "Tensors are missing, left over, or of another shape or type; all are listed. `--allow-missing GLOB` and `--allow-extra GLOB` let \
     names pass, never shapes or types."
    "RM4032" 3 "none of the wanted tensors is in the checkpoint"
    "It is of another model, or its names are others. `remesh inspect` lists them."
    "RM4033" 2 "nothing is wanted from the checkpoint"
    "Name at least one tensor."
    "RM4034" 70 "a rank could not read its own state"
    "The trainer could not give the bytes that its placement says it holds."
    "RM4035" 70 "a rank could not take what was read"
    "The cause says which memory or device failed."
    "RM4040" 6 "`checkpoint.json` does not describe a training run"
    "Its settings, data or schedule cannot be understood: it is of another program. `remesh inspect` shows what it holds."
    "RM4050" 6 "memory does not hold what the checkpoint says"
    "A tensor's fingerprint, recomputed after loading, is another one. `remesh verify` checks the files; if they are whole, it is a \
     fault of the program or of the memory."
    "RM4060" 3 "no safetensors file is there"
    "A folder of safetensors holds `model.safetensors`, or several files and `model.safetensors.index.json`."
    "RM4061" 6 "a safetensors file breaks a rule of its format"
    "Its header was read and nothing else. The download or the copy may be incomplete; fetch the file again."
    "RM4062" 6 "safetensors files and their index do not agree"
    "Each tensor is in the one file that the index names. Fetch the files of one revision."
    "RM4063" 6 "a `config.json` describes no model that is known here"
    "A field is missing, has no meaning, or asks for what is not there: nothing that changes numbers is passed over."

    "RM6001" 2 "a wrong command line"
    "`--help` lists commands and flags."
    "RM6002" 2 "a key that the configuration file cannot have"
    "Keys are the flags of `remesh train` with underscores, in the tables `[model]`, `[parallelism]`, `[training]`, `[data]`, \
     `[checkpoint]` and `[logging]`."
    "RM6003" 2 "a setting that cannot be"
    "A value out of its range, or two settings that contradict each other. The message names them with the valid range."
    "RM6004" 2 "a setting is missing"
    "It has no default. Give the flag, or the key of the same name in the configuration file."
    "RM6005" 2 "a setting that is not there yet"
    "The flag is known, and would change numbers or files in a way that this program does not do. Leave it out."
    "RM6006" 2 "several things are missing or wrong"
    "`remesh config check` lists all that it finds. Mend one after the other; run it again to see what is left."
    "RM6008" 2 "no error has that code"
    "`remesh explain` lists all codes."
    "RM6009" 2 "a pattern that is none"
    "Patterns are globs, such as `decoder.layers.0.*`; `**` is everything."
    "RM6010" 2 "numbers that make no schedule"
    "Lengths must fit into one another (warm-up < decay), and rates must be 0 ≤ min ≤ max, all finite."
    "RM6011" 2 "a launcher's environment that cannot be"
    "The error names the variable. `docs/cli.md` lists what is read of torchrun, Slurm, MPI and Kubernetes."

    "RM7002" 7 "another run saves here"
    "Two runs save to one folder. Stop one of them, or give it another folder."
    "RM7003" 7 "`--save` holds newer checkpoints"
    "To go on from an older step would contradict them. Save elsewhere, or give `--overwrite`: their commits are renamed once the \
     older step is loaded, and nothing is deleted."
    "RM7004" 7 "something would be written over"
    "What lies there is left alone. Give another place."
    "RM7005" 7 "the folder is that of another program's run"
    "Megatron keeps its steps there, under the same names and with a file that says which is the latest. Save to another folder."
    "RM7010" 2 "ranks are about to save different things"
    "All ranks must run the same program with the same settings. Nothing was written."
    "RM7011" 5 "ranks could not agree on a save"
    "One of them ended, or could not be reached, while they saved. The checkpoint before is intact."
    "RM7012" 5 "files changed while they were saved"
    "Something else removes or changes files in the folder. The save was given up; the checkpoint before is intact."

    "RM8001" 3 "no GPU"
    "NVIDIA's driver was not found, or it sees fewer GPUs than were asked for. `remesh doctor` lists what is there; `--device cpu` \
     needs no GPU."
    "RM8002" 3 "CUDA's run-time compiler is not there"
    "Kernels are compiled when a run starts, by libnvrtc of CUDA 13. `remesh doctor` shows where it is looked for."
    "RM8003" 70 "a GPU cannot be used"
    "The driver or the compiler refused; the error has their words. `remesh doctor` shows the versions that were found."
    "RM8004" 8 "no memory is left on the device"
    "Less is needed with a smaller micro-batch, or with more ranks on more devices."
    "RM8005" 3 "NCCL is not there"
    "Ranks on several GPUs exchange data by libnccl, 2.14 or newer. `remesh doctor` shows where it is looked for."

    "RM9000" 70 "an error without a code"
    "A fault of the program; please report it."
    "RM9001" 70 "ranks disagree about the program"
    "A fault of the program; please report it."
    "RM9002" 101 "a rank panicked"
    "Or a signal ended its process that stands for a crash. A fault of the program; please report it with the message."
    "RM9003" 70 "ranks wait for each other"
    "They issued different collectives, or wait in a circle. A fault of the program; please report it with the message."
    "RM9004" 70 "the system gives no random numbers"
    "The names of a checkpoint's files need some. See what the system says."
}

/// The entry of `code`.
pub(crate) fn find(code: &str) -> Option<&'static Code> {
    CODES.iter().find(|known| known.code == code)
}

/// What scripts learn from an exit code.
pub(crate) fn exit_text(exit: u8) -> &'static str {
    match exit {
        1 => "a check said no",
        2 => "usage, configuration, or a layout that cannot be",
        3 => "not found",
        4 => "permission denied",
        5 => "storage or a rank failed; running again may help",
        6 => "damaged or unsupported checkpoint or data",
        7 => "the destination holds what would be contradicted or written over",
        8 => "out of disk, quota, memory or threads",
        70 => "fault of the program",
        101 => "panic",
        _ => unreachable!("no code of the table has exit code {exit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn sources(folder: &Path, all: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, all);
            } else if path.extension().is_some_and(|end| end == "rs") {
                all.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
            }
        }
    }

    fn workspace() -> Vec<(String, String)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut all = Vec::new();
        ["src", "mesh/src", "ckpt/src", "train/src", "reshard/src"]
            .iter()
            .for_each(|folder| sources(&root.join(folder), &mut all));
        all.retain(|(path, _)| !path.ends_with("report/codes.rs"));
        all
    }

    #[test]
    fn every_code_is_listed_once_with_exit_text_and_a_line_in_the_documents() {
        assert!(CODES.is_sorted_by(|one, other| one.code < other.code), "ascending, none twice");
        let mut used = BTreeSet::new();
        for (_, text) in workspace() {
            // In quotes: where an error gets its code, not where a comment speaks of one.
            used.extend(text.match_indices("\"RM").filter_map(|(at, _)| {
                let code = text.get(at + 1..at + 7)?;
                (text.as_bytes().get(at + 7) == Some(&b'"')).then(|| code.to_owned())
            }));
        }
        let listed: BTreeSet<String> = CODES.iter().map(|known| known.code.to_owned()).collect();
        assert_eq!(used, listed);
        let documents = include_str!("../../docs/errors.md");
        for Code { code, exit, means, text } in CODES {
            let line = format!("| `{code}` | {exit} | {means} |");
            assert!(documents.contains(&line), "docs/errors.md lacks: {line}");
            assert!(text.ends_with('.') && !exit_text(*exit).is_empty(), "{code}");
        }
    }

    /// What a library tells of an error reaches the user only if the error's type is looked for in the chain.
    #[test]
    fn every_error_of_a_library_that_has_a_code_is_known_to_the_report() {
        let report = include_str!("../report.rs");
        let mut types = BTreeSet::new();
        for (path, text) in workspace() {
            for (at, _) in text.match_indices("pub fn code(&self)") {
                let before = &text[..at];
                let name = before.rsplit_once("\nimpl ").unwrap().1.split([' ', '{']).next().unwrap();
                assert!(report.contains(name), "{path}: `{name}`");
                types.insert(name.to_owned());
            }
        }
        assert!(types.len() > 12, "the search finds what it must: {types:?}");
    }
}
