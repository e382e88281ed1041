#include <stdio.h>
#include <string.h>

#include "trainer/compare/compare_internal.h"

static const char notes[] =
    "Every recipe gets the same first weights, data, order and type of matrix products, so that only the storage "
    "differs.\n"
    "Runs are made one after the other, all recipes with one seed before the next seed; the report is rewritten after "
    "each.\n" COMPARE_GOES_ON
    "With --checkpoint DIR every run saves into a folder of its own in DIR, and --resume continues each of them.\n";

static int complete(struct compare *compare, char *error, size_t error_bytes)
{
    int status = run_config_complete(&compare->args, compare->groups, 2, &compare->base, error, error_bytes);
    /* A report has no samples, so they are generated only if asked for. */
    if (!args_given(&compare->args, "sample-bytes")) compare->base.sample_bytes = 0;
    return status;
}

static int load(struct compare *compare, char *error, size_t error_bytes)
{
    return run_data_load(&compare->base, &compare->data.lm, error, error_bytes) != 0;
}

static void unload(struct compare *compare) { run_data_free(&compare->data.lm); }

static int keep(struct report_run *run, const struct run_result *result)
{
    run->tokens_per_s = result->tokens_per_s;
    for (size_t i = 0; i < result->history.n_points; i++)
        if (report_curve_add(&run->train, result->history.point[i].step, result->history.point[i].train_loss) != 0)
            return -1;
    for (size_t i = 0; i < result->history.n_validations; i++)
        if (report_curve_add(&run->validation, result->history.validation[i].step,
                             result->history.validation[i].loss) != 0)
            return -1;
    run_result_document(&run->json, result);
    return compare_keep(run, result);
}

static int train(struct compare *compare, const struct run_config *config, struct progress *progress,
                 struct report_run *run, char *error, size_t error_bytes)
{
    struct run_result result;
    int status = train_run(config, &compare->data.lm, progress, &result, error, error_bytes);
    if ((status == 0 || result.diverged) && keep(run, &result) != 0) status = no_memory(error, error_bytes);
    run_result_free(&result);
    return status;
}

static void describe_file(struct compare *compare, const char *name, const char *path, size_t bytes, uint64_t hash)
{
    hstep_buffer text = {0};
    hstep_append_format(&text, "%s, ", path);
    text_add_count(&text, (double)bytes);
    hstep_append_format(&text, " bytes, hash %016llx", (unsigned long long)hash);
    compare_fact(compare, name, &text);
    text_free(&text);
}

static void describe(struct compare *compare, hstep_buffer *subtitle)
{
    const struct run_config *base = &compare->base;
    const struct run_data *data = &compare->data.lm;
    struct lm_config shape = run_shape(base);
    char error[256], title[280];
    if (lm_config_check(&shape, error, sizeof error) == 0) {
        hstep_append_format(subtitle, "a language model of ");
        text_add_count(subtitle, (double)lm_parameter_count(&shape));
        hstep_append_format(subtitle, " parameters, ");
    }
    text_add_count(subtitle, (double)base->steps);
    hstep_append_format(subtitle, " steps of %lld × %lld bytes of %s", (long long)(base->batch * base->micro_steps),
                        (long long)base->context, compare_file_name(base->data.item[0]));
    if (base->data.n > 1) hstep_append_format(subtitle, " and %d more", base->data.n - 1);
    run_data_title(&base->data, title, sizeof title);
    describe_file(compare, "data", title, data->data_file.n, data->data_hash);
    if (!base->val.n) return;
    run_data_title(&base->val, title, sizeof title);
    describe_file(compare, "val", title, data->val_file.n, data->val_hash);
}

int compare_lm(const struct comparison *comparison, int argc, char **argv)
{
    static const struct compare_kind kind = {
        .usage = "--data FILE... --recipes R,R,... [options]",
        .summary = "Trains the same model under several recipes and reports the effect of the storage: a table, one "
                   "sentence, and a page with curves.",
        .notes = notes,
        .recipes = "adamw/f32,adamw/bf16,adamw/bf16-sr,adamw/bf16-kahan,adamw/bf16-sr/int8",
        .expect = "end with status 1 unless these recipes end more than X nat above the reference, less than X above, "
                  "within X "
                  "of it",
        .options_init = run_options_init,
        .complete = complete,
        .load = load,
        .unload = unload,
        .train = train,
        .describe = describe,
    };
    return compare_run(&kind, comparison, argc, argv);
}
