#include "host/process_table.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool read_proc(pid_t pid, const char *name, char *text, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, text, size - 1);
    close(file);
    if (length <= 0)
        return false;
    text[length] = '\0';
    return true;
}

/* The text of /proc/PID/stat from field 3 on: the command name before it may hold spaces and parentheses. */
static const char *stat_from_state(pid_t pid, char *text, size_t size) {
    if (pid <= 0 || !read_proc(pid, "stat", text, size))
        return NULL;
    const char *name_end = strrchr(text, ')');
    return name_end != NULL && name_end[1] == ' ' ? name_end + 2 : NULL;
}

uint64_t process_start_time(pid_t pid) {
    char text[1024];
    const char *field = stat_from_state(pid, text, sizeof text);
    if (field == NULL)
        return 0;
    /* A process whose first thread has ended looks like a zombie and lives on with the others. */
    bool first_ended = *field == 'Z' || *field == 'X';
    for (int number = 3; number < 22 && field != NULL; number++) {
        if (number == 20 && first_ended && strtol(field, NULL, 10) <= 1)
            return 0;
        field = strchr(field, ' ');
        if (field != NULL)
            field++;
    }
    return field == NULL ? 0 : strtoull(field, NULL, 10);
}

bool process_is_stopped(pid_t pid) {
    char text[1024];
    const char *state = stat_from_state(pid, text, sizeof text);
    return state != NULL && (*state == 'T' || *state == 't');
}

void restore_thread_name(pid_t pid, char name[16]) {
    snprintf(name, 16, "cuda%011x", (unsigned)pid);
}

bool process_has_restore_thread(pid_t pid, pid_t tid) {
    char file[48], expected[16], found[32];
    snprintf(file, sizeof file, "task/%d/comm", (int)tid);
    restore_thread_name(pid, expected);
    return read_proc(pid, file, found, sizeof found) && strncmp(found, expected, strlen(expected)) == 0;
}

pid_t process_of_thread(pid_t tid) {
    char text[4096];
    if (tid <= 0 || !read_proc(tid, "status", text, sizeof text))
        return 0;
    const char *line = strstr(text, "\nTgid:");
    return line == NULL ? 0 : (pid_t)strtol(line + 6, NULL, 10);
}
